"""Any order of events, found by Hypothesis and shrunk to the shortest that goes wrong.

The simulation has long random runs of a whole engine. Here the scheduler, the block manager
and a fake executor are driven one call at a time, so that steps are scheduled, completed
and failed with anything in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from octavo_core.block_manager import HOLE, BlockManager
from octavo_core.config import SchedulerConfig
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.policies import FairSharePolicy, FCFSPolicy, PriorityPolicy, SchedulingPolicy
from octavo_core.scheduler import Scheduler
from octavo_core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest
from support.engine_fakes import FakeExecutor, make_request
from support.simulation import alone

MAX_MODEL_LEN = 24
PREFIXES = ([1] * MAX_MODEL_LEN, [1] * 5 + [2] * MAX_MODEL_LEN)
LONG_AGO, NEVER, DOOMSDAY = 1.0, 1e18, 2e18


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go while steps are scheduled ahead, completed, and fail."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_slots=st.integers(1, 4),
        budget=st.integers(1, 20),
        threshold=st.sampled_from([0, 3]),
        room=st.integers(0, 20),
        num_host_blocks=st.sampled_from([0, 2, 30]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (3,)]),
        depth=st.integers(1, 3),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from([FCFSPolicy, PriorityPolicy, FairSharePolicy]),
    )
    def start(
        self,
        block_size: int,
        num_slots: int,
        budget: int,
        threshold: int,
        room: int,
        num_host_blocks: int,
        windows: tuple[int | None, ...],
        depth: int,
        enable_prefix_caching: bool,
        policy: Callable[[], SchedulingPolicy],
    ) -> None:
        groups = [KVCacheGroup((index,), window) for index, window in enumerate(windows)]
        needed = -(-MAX_MODEL_LEN // block_size) * len(groups)  # by the longest request alone
        self.budget, self.num_slots, self.depth = budget, num_slots, depth
        self.blocks = BlockManager(
            needed + room,
            block_size,
            enable_prefix_caching,
            groups=groups,
            num_host_blocks=num_host_blocks,
            max_step_tokens=budget,
        )
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=num_slots,
            long_prefill_token_threshold=threshold,
        )
        self.scheduler = Scheduler(config, self.blocks, MAX_MODEL_LEN, policy())
        self.executor = FakeExecutor(block_size, num_slots, windows=windows)
        self.executor.initialize_kv_cache(needed + room, num_host_blocks)
        self.in_flight: deque[Future[ModelRunnerOutput]] = deque()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.poisoned: set[str] = set()
        self.num_faults = 0

    # What can happen

    @rule(
        prefix=st.sampled_from(PREFIXES),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        tail=st.integers(3, 5),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, None, "salt"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from([None, "a"]),
        has_deadline=st.booleans(),
    )
    def add(
        self,
        prefix: list[int],
        length: int,
        tail: int,
        max_tokens: int,
        salt: str | None,
        priority: int,
        tenant: str | None,
        has_deadline: bool,
    ) -> None:
        request = make_request(
            f"r{len(self.requests)}",
            [*prefix[: length - 1], tail],
            max_tokens=min(max_tokens, MAX_MODEL_LEN - length),
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            deadline=NEVER if has_deadline else None,
        )
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.expected[request.request_id] = alone(request)
        self.scheduler.add_request(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if alive := self.alive():
            name = data.draw(st.sampled_from(alive))
            self.ends[name] = "abort"
            self.scheduler.abort_requests([name, "unknown"])

    @rule()
    def expire(self) -> None:
        assert self.scheduler.expire(LONG_AGO) == []
        mortal = {name for name in self.alive() if self.requests[name].deadline is not None}
        outputs = self.scheduler.expire(DOOMSDAY)
        assert {output.request_id for output in outputs} == mortal
        self.take(outputs)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert self.blocks.pool.num_cached == self.blocks.host.num_used == 0

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        if step is None:
            assert self.in_flight or not self.alive(), "there is work, and nothing is scheduled"
            return
        self.check_step(step)
        self.executor.execute_model(step)
        self.in_flight.append(self.executor.sample_tokens(None))

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self) -> None:
        try:
            output = self.in_flight.popleft().result()
        except RuntimeError:
            while self.in_flight:
                self.in_flight.popleft().exception()
            self.take(self.scheduler.roll_back("a test"))
        else:
            self.take(self.scheduler.update_from_output(output))

    @rule()
    def turn(self) -> None:
        """What the engine does, so that runs get far enough."""
        while len(self.in_flight) < self.depth:
            before = len(self.in_flight)
            self.schedule()
            if len(self.in_flight) == before:
                break
        if self.in_flight:
            self.complete()

    @rule()
    def fail(self) -> None:
        self.executor.fail_next_step = True
        self.num_faults += 1

    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        if alive := self.alive():
            self.poisoned.add(data.draw(st.sampled_from(alive)))
            self.executor.poison = self.poisoned

    # What holds

    def alive(self) -> list[str]:
        return [name for name in self.requests if name not in self.ends]

    def take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.ends, "an output after the end"
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[name] = output.error_kind or output.finish_reason

    def check_step(self, step: SchedulerOutput) -> None:
        assert 0 < step.total_num_scheduled_tokens <= self.budget
        assert min(step.num_scheduled_tokens) > 0
        assert len(set(step.slots)) == len(step.slots)
        running = {request.slot for request in self.scheduler.running}
        assert set(step.slots) <= running
        assert {new.slot for new in step.new_requests} <= set(step.slots)

    @invariant()
    def every_block_is_held_as_often_as_it_is_counted(self) -> None:
        pool = self.blocks.pool
        holders = [0] * pool.num_blocks
        for request in self.scheduler.running:
            for table in request.block_tables:
                for block_id in table:
                    if block_id != HOLE:
                        holders[block_id] += 1
        assert holders == [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
        assert pool.num_used == sum(map(bool, holders))
        assert pool.num_used + pool.num_free == pool.num_blocks

    @invariant()
    def keys_and_blocks_belong_together(self) -> None:
        pool = self.blocks.pool
        keys = [pool.key_of(block_id) for block_id in range(pool.num_blocks)]
        known = [(block_id, key) for block_id, key in enumerate(keys) if key is not None]
        assert all(pool.lookup(key) == block_id for block_id, key in known)
        assert len(known) == pool.num_cached

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        scheduler = self.scheduler
        running = [request.request_id for request in scheduler.running]
        assert len(running) + scheduler.num_waiting == len(self.alive())
        assert set(running) <= set(self.alive())
        slots = [request.slot for request in scheduler.running]
        assert sorted(slots + scheduler._free_slots) == list(range(self.num_slots))
        waiting = set(self.alive()) - set(running)
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (len(running), len(waiting))
        assert stats.num_waiting_tokens == sum(
            scheduler._requests[name].num_tokens for name in waiting
        )

    @invariant()
    def answers_are_those_of_a_run_alone(self) -> None:
        for name, tokens in self.tokens.items():
            assert tokens == self.expected[name][: len(tokens)]

    def teardown(self) -> None:
        """With faults stopped, every request ends and the pool returns to its start."""
        if not hasattr(self, "scheduler"):
            return
        self.executor.fail_next_step = False
        self.executor.poison = set()
        for _ in range(3000):
            if not self.in_flight and not self.scheduler.has_unfinished_requests():
                break
            self.turn()
            self.every_block_is_held_as_often_as_it_is_counted()
        assert not self.alive(), "some request never ends"
        assert self.blocks.pool.num_used == 0
        for name, end in self.ends.items():
            if end == "length":
                assert self.tokens[name] == self.expected[name]
            elif end == "RequestFailedError":
                # Who fails alone is a culprit: by bad luck, if another fault happens just then.
                assert name in self.poisoned or self.num_faults, "an innocent was failed"
        policy = self.scheduler._policy
        assert not policy._arrivals, "the policy keeps requests that have ended"  # type: ignore[attr-defined]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
