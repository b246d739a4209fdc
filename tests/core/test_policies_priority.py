"""Priority: who goes first, who makes room, and how long anybody waits at most."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.block_manager import BlockManager
from octavo_core.config import SchedulerConfig
from octavo_core.policies import PriorityPolicy
from octavo_core.request import Request
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput
from support.engine_fakes import make_request
from support.policy_driver import PolicyDriver, make_waiting


def arrive(driver: PolicyDriver, name: str, priority: int) -> Request:
    return driver.arrive(make_waiting(name, priority=priority))


def test_the_lowest_value_goes_first_then_the_oldest() -> None:
    driver = PolicyDriver(PriorityPolicy())
    low, high, usual, high_too = (
        arrive(driver, str(index), priority) for index, priority in enumerate([9, -5, 0, -5])
    )
    assert [driver.admit() for _ in range(4)] == [high, high_too, usual, low]


def test_the_victim_is_the_least_important_then_the_newest() -> None:
    driver = PolicyDriver(PriorityPolicy())
    low, low_too, high = (arrive(driver, *who) for who in [("a", 7), ("b", 7), ("c", 1)])
    for _ in range(3):
        driver.admit()
    assert [driver.preempt() for _ in range(3)] == [low_too, low, high]


def test_whoever_is_preempted_is_the_first_of_its_priority_again() -> None:
    driver = PolicyDriver(PriorityPolicy())
    first = arrive(driver, "first", 5)
    driver.admit()
    second = arrive(driver, "second", 5)
    important = arrive(driver, "important", 4)
    driver.preempt()
    assert [driver.admit() for _ in range(3)] == [important, first, second]


def test_every_kth_admission_takes_the_oldest() -> None:
    driver = PolicyDriver(PriorityPolicy(promote_every=3))
    lows = [arrive(driver, f"low{index}", 100) for index in range(2)]
    highs = [arrive(driver, f"high{index}", 0) for index in range(9)]
    taken = [driver.admit() for _ in range(6)]
    assert taken == [*highs[:2], lows[0], *highs[2:4], lows[1]]


def test_a_promoted_request_is_no_victim_while_others_run_and_comes_back_first() -> None:
    driver = PolicyDriver(PriorityPolicy(promote_every=3))
    promoted = arrive(driver, "promoted", 100)
    a, b = (arrive(driver, name, 0) for name in "ab")
    assert [driver.admit() for _ in range(3)] == [a, b, promoted]
    assert [driver.preempt() for _ in range(3)] == [b, a, promoted]
    arrive(driver, "very important", -100)
    assert driver.admit() is promoted
    assert driver.admit() is driver.admitted[-1]
    assert promoted is driver.admitted[-2]


def test_with_k_of_one_it_is_first_come_first_served() -> None:
    driver = PolicyDriver(PriorityPolicy(promote_every=1))
    all_of_them = [arrive(driver, str(index), -index) for index in range(10)]
    assert [driver.admit() for _ in range(10)] == all_of_them


def test_a_flood_of_important_requests_starves_nobody() -> None:
    driver = PolicyDriver(PriorityPolicy())
    for index in range(20):
        arrive(driver, f"old{index}", 0)
    low = arrive(driver, "low", 1000)
    for index in range(8 * 21):
        arrive(driver, f"flood{index}", -1)
        if driver.admit() is low:
            break
    assert low in driver.admitted
    assert len(driver.admitted) <= 8 * 21


@settings(max_examples=200, deadline=None)
@given(
    promote_every=st.integers(1, 5),
    events=st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "admit", "admit", "preempt", "end", "abort"]),
            st.integers(-5, 5),
        ),
        max_size=120,
    ),
)
def test_nobody_waits_longer_than_the_bound(
    promote_every: int, events: list[tuple[str, int]]
) -> None:
    """k (m + 1) admissions, and k more for each older one that is put back in line."""
    driver = PolicyDriver(PriorityPolicy(promote_every))
    allowed: dict[Request, int] = {}  # further admissions until its turn has to come

    def start_waiting(request: Request) -> None:
        arrival = driver.arrivals[request]
        num_older = sum(driver.arrivals[other] < arrival for other in driver.waiting)
        allowed[request] = promote_every * (num_older + 1)

    def admit() -> None:
        admitted = driver.admit()
        for request in driver.waiting:
            allowed[request] -= 1
            assert allowed[request] > 0, "passed over for longer than it was promised"
        allowed.pop(admitted)

    for event, number in events:
        if event == "arrive":
            start_waiting(arrive(driver, f"r{len(driver.arrivals)}", number))
        elif event == "admit" and driver.waiting:
            admit()
        elif event == "preempt" and driver.running:
            victim = driver.preempt()
            for request in driver.waiting:
                if driver.arrivals[request] > driver.arrivals[victim]:
                    allowed[request] += promote_every
            start_waiting(victim)
        elif event == "end" and driver.running:
            driver.finish(driver.running[number % len(driver.running)])
        elif event == "abort" and driver.waiting:
            gone = driver.waiting[number % len(driver.waiting)]
            driver.abort(gone)
            del allowed[gone]
    while driver.waiting:
        admit()


def test_a_victim_that_was_part_of_the_step_leaves_nothing_behind_that_was_not_computed() -> None:
    """The older request is the victim, so its chunk is scheduled before it is chosen."""
    config = SchedulerConfig(max_num_batched_tokens=16, long_prefill_token_threshold=8)
    blocks = BlockManager(num_blocks=8, block_size=4)
    scheduler = Scheduler(config, blocks, max_model_len=28, policy=PriorityPolicy())
    low = make_request("low", 24, priority=5)
    scheduler.add_request(low)
    counts = []
    for name in ("high", None, None):
        step = scheduler.schedule()
        assert step is not None
        counts.append(step.num_scheduled_tokens)
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, [-1] * len(step.slots)))
        if name is not None:
            scheduler.add_request(make_request(name, 12, priority=0))
    # In the last step low got the last two blocks, and then high needed one.
    assert counts == [[8], [8, 8], [4]]
    assert scheduler.num_preemptions == 1
    assert blocks.find_cached_prefix(Request(low, 28)).num_tokens == 16


def test_a_step_that_preempts_admits_nobody() -> None:
    """What was given up was needed; the next step sees what is left of it."""
    config = SchedulerConfig(max_num_batched_tokens=16, long_prefill_token_threshold=16)
    scheduler = Scheduler(config, BlockManager(8, 4), max_model_len=28, policy=PriorityPolicy())
    for name, prompt, priority in (("high", 8, 0), ("low", 20, 9)):
        scheduler.add_request(make_request(name, prompt, priority=priority))

    def schedule() -> list[str]:
        step = scheduler.schedule()
        assert step is not None
        known = {request.slot: request.num_tokens for request in scheduler.running}
        computed = {
            slot: start + count
            for slot, start, count in zip(
                step.slots, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
            )
        }
        sampled = [7 if computed[slot] == known[slot] else -1 for slot in step.slots]
        scheduler.update_from_output(ModelRunnerOutput(step.step_id, sampled))
        return [new.request_id for new in step.new_requests]

    assert schedule() == ["high", "low"]
    scheduler.add_request(make_request("usual", 4, priority=5))
    before = scheduler.num_preemptions
    while scheduler.num_preemptions == before:
        admitted = schedule()
    assert admitted == []
    assert schedule() == ["usual"]
