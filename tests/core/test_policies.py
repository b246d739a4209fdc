"""What holds for every policy, and the base of policies of one's own."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.block_manager import BlockManager
from octavo_core.config import SchedulerConfig
from octavo_core.errors import ConfigError
from octavo_core.policies import (
    FairSharePolicy,
    FCFSPolicy,
    PriorityPolicy,
    SchedulingPolicy,
)
from octavo_core.policies.lazy_heap import LazyHeap
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput
from support.engine_fakes import make_request
from support.policy_driver import PolicyDriver, ShortestPromptFirst, make_waiting

POLICIES = [FCFSPolicy, PriorityPolicy, FairSharePolicy, ShortestPromptFirst]
every_policy = pytest.mark.parametrize("make_policy", POLICIES, ids=lambda policy: policy.__name__)

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive", "arrive", "admit", "admit", "suspect", "preempt", "step", "abort"]
        ),
        st.integers(0, 7),
    ),
    max_size=80,
)


def play(driver: PolicyDriver, events: list[tuple[str, int]]) -> None:
    """Let events happen as far as they can; the number says to whom or with what."""
    for event, number in events:
        alive = driver.waiting + driver.running
        if event == "arrive":
            driver.arrive(
                make_waiting(
                    f"r{len(driver.arrivals)}",
                    1 + number,
                    priority=number % 3,
                    tenant=[None, "a", "b"][number % 3],
                    max_tokens=1 + number,
                )
            )
        elif event == "admit" and driver.waiting:
            driver.admit()
        elif event == "suspect" and driver.waiting:
            driver.admit_out_of_turn(driver.waiting[number % len(driver.waiting)])
        elif event == "preempt" and driver.running:
            driver.preempt()
        elif event == "step":
            driver.step()
        elif event == "abort" and alive:
            driver.abort(alive[number % len(alive)])


@every_policy
@settings(max_examples=150, deadline=None)
@given(events=EVENTS)
def test_whatever_happens_each_request_is_admitted_until_it_ends(
    make_policy: Callable[[], SchedulingPolicy], events: list[tuple[str, int]]
) -> None:
    driver = PolicyDriver(make_policy())
    play(driver, events)
    while driver.waiting:
        driver.admit()
    while driver.running:
        driver.step()
    for name, kept in vars(driver.policy).items():
        if isinstance(kept, dict | set | LazyHeap):
            assert len(kept) == 0 or name in ("_tenants", "_idle"), f"{name} keeps ended requests"


@every_policy
def test_ending_twice_does_no_harm(make_policy: Callable[[], SchedulingPolicy]) -> None:
    """A scheduler that aborts a preempted request may say both `remove` and `finish`."""
    policy = make_policy()
    request = make_waiting("a")
    policy.add(request)
    policy.pop()
    policy.requeue(request)
    policy.remove(request)
    policy.finish(request)
    policy.finish(request)
    assert len(policy) == 0


@every_policy
def test_memory_does_not_grow_with_the_requests_served(
    make_policy: Callable[[], SchedulingPolicy],
) -> None:
    """A hundred wait all the time, each request under a tenant of its own."""
    policy = make_policy() if make_policy is not FairSharePolicy else FairSharePolicy(1, 2, 100)
    numbers = itertools.count()

    def serve(count: int) -> None:
        for number in itertools.islice(numbers, count):
            policy.add(make_waiting(f"r{number}", 2, tenant=f"t{number}", priority=number % 9))
            if len(policy) > 100:
                policy.finish(policy.pop())

    serve(1000)
    tracemalloc.start()
    serve(1000)
    before, _ = tracemalloc.get_traced_memory()
    serve(4000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000  # 4000 requests kept would be millions


@every_policy
def test_a_scheduler_serves_all_under_every_policy(
    make_policy: Callable[[], SchedulingPolicy],
) -> None:
    """So few blocks that they preempt each other, and every one ends with its tokens."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=5),
        BlockManager(num_blocks=12, block_size=2),
        max_model_len=24,
        policy=make_policy(),
    )
    lengths = {}
    for number in range(24):
        request = make_request(
            f"r{number}",
            1 + number % 9,
            max_tokens=3 + number % 11,
            priority=number % 4,
            tenant=f"t{number % 3}",
        )
        lengths[request.request_id] = request.sampling_params.max_tokens
        scheduler.add_request(request)
    got = dict.fromkeys(lengths, 0)
    for _ in range(2000):
        if not scheduler.has_unfinished_requests():
            break
        step = scheduler.schedule()
        known = {request.slot: request.num_tokens for request in scheduler.running}
        sampled = [
            7 if start + count == known[slot] else -1
            for slot, count, start in zip(
                step.slots, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
            )
        ]
        for output in scheduler.update_from_output(ModelRunnerOutput(step.step_id, sampled)):
            got[output.request_id] += len(output.new_token_ids)
    assert got == lengths
    assert scheduler.num_preemptions > 0


def test_fcfs_admits_in_order_of_arrival_and_the_preempted_first() -> None:
    driver = PolicyDriver(FCFSPolicy())
    a, b, c, d = (driver.arrive(make_waiting(name)) for name in "abcd")
    assert [driver.admit() for _ in range(3)] == [a, b, c]
    assert [driver.preempt(), driver.preempt()] == [c, b]
    assert [driver.admit() for _ in range(3)] == [b, c, d]


def test_a_policy_of_ones_own_needs_a_sort_key_only() -> None:
    driver = PolicyDriver(ShortestPromptFirst())
    long, short, longest, short_too = (
        driver.arrive(make_waiting(str(index), prompt)) for index, prompt in enumerate([5, 2, 9, 2])
    )
    assert [driver.admit() for _ in range(4)] == [short, short_too, long, longest]
    assert driver.preempt() is longest
    assert driver.preempt() is long
    assert driver.preempt() is short_too  # of two equals, the newer


def test_a_preempted_request_comes_first_within_its_class_and_not_before_others() -> None:
    driver = PolicyDriver(ShortestPromptFirst())
    first = driver.arrive(make_waiting("first", 5))
    driver.admit()
    older = driver.arrive(make_waiting("older", 5))
    shorter = driver.arrive(make_waiting("shorter", 4))
    driver.preempt()
    assert [driver.admit() for _ in range(3)] == [shorter, first, older]


@pytest.mark.parametrize("k", [0, -1])
def test_priority_needs_a_positive_k(k: int) -> None:
    with pytest.raises(ConfigError, match=f"promote_every is {k}"):
        PriorityPolicy(promote_every=k)


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 20))))
def test_a_lazy_heap_is_a_sorted_list_that_forgets(events: list[tuple[str, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    keys: dict[int, int] = {}  # in order of the last push
    for event, item in events:
        if event == "push":
            keys.pop(item, None)
            keys[item] = item * 7 % 5
            heap.push(item, keys[item])
        elif event == "remove" and item in heap:
            heap.remove(item)
            del keys[item]
        elif event == "pop" and keys:
            smallest = min(keys, key=keys.__getitem__)
            assert heap.key_of(smallest) == keys.pop(smallest)
            assert heap.peek() == smallest
            assert heap.pop() == smallest
        assert len(heap) == len(keys)
        assert len(heap._heap) <= 2 * len(heap) + 16
