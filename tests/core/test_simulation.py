"""Random arrivals, prefixes, aborts and failures against a fake executor.

After every event the invariants of the design hold; at the end every request has ended
once, with the tokens it gets when it runs alone, and the pool is as it was.
"""

from __future__ import annotations

import random

import pytest

from octavo_core.block_hash import ROOT_HASH, hash_block
from octavo_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo_core.engine_core import EngineCore
from octavo_core.wire import EngineCoreRequest
from support.engine_fakes import FakeExecutor, expected_output, make_request, tiny_spec

NUM_SEEDS = 300


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        block_size = self.random.choice([1, 2, 4, 16])
        self.max_model_len = self.random.randint(20, 120)
        min_blocks = -(-self.max_model_len // block_size)
        num_slots = self.random.randint(1, 8)
        self.budget = self.random.randint(1, 60)
        config = EngineConfig(
            model=ModelConfig(max_model_len=self.max_model_len),
            cache=CacheConfig(
                block_size=block_size,
                num_gpu_blocks_override=self.random.randint(min_blocks, 3 * min_blocks),
                enable_prefix_caching=self.random.random() < 0.8,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=self.budget,
                max_num_seqs=num_slots,
                long_prefill_token_threshold=self.random.choice([0, 3, 20]),
            ),
        )
        self.executor = FakeExecutor(block_size, num_slots)
        self.engine = EngineCore(config, tiny_spec(), self.executor)
        self.engine.start(lambda stage, progress: None)
        self.scheduler = self.engine.scheduler
        self.prefixes = [
            [self.random.randrange(1000) for _ in range(self.random.randint(1, 60))]
            for _ in range(3)
        ]
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.aborted: set[str] = set()

    def run(self) -> None:
        for _ in range(self.random.randint(20, 80)):
            event = self.random.random()
            if event < 0.35:
                self.arrive()
            elif event < 0.42:
                self.abort()
            elif event < 0.45:
                self.executor.fail_next_step = True
            else:
                self.step()
            self.check_invariants()
        self.executor.fail_next_step = False
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
            self.check_invariants()
        self.check_end()

    def arrive(self) -> None:
        prefix = self.random.choice(self.prefixes)
        prompt = prefix[: self.random.randint(0, len(prefix))]
        prompt = prompt + [self.random.randrange(1000) for _ in range(self.random.randint(1, 30))]
        prompt = prompt[: self.max_model_len - 1]
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=self.random.randint(1, self.max_model_len - len(prompt)),
            cache_salt=self.random.choice([None, None, "tenant"]),
        )
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.engine.add_request(request)

    def abort(self) -> None:
        alive = [name for name in self.requests if name not in self.reasons | self.dead()]
        if alive:
            name = self.random.choice(alive)
            self.aborted.add(name)
            self.engine.abort_requests([name])

    def dead(self) -> dict[str, str]:
        return dict.fromkeys(self.aborted, "abort")

    def step(self) -> None:
        before = self.engine.has_unfinished_requests()
        for output in self.engine.step().outputs:
            name = output.request_id
            assert name not in self.aborted
            assert name not in self.reasons, "a request ended twice"
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason
        assert self.executor.max_tokens_in_a_step <= self.budget
        assert before or not self.engine.has_unfinished_requests()

    def check_invariants(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.blocks.pool
        holders = [0] * pool.num_blocks
        for request in scheduler.running:
            for block_id in request.block_ids:
                holders[block_id] += 1
        assert holders == [pool.ref_count(i) for i in range(pool.num_blocks)]
        assert pool.num_used == sum(count > 0 for count in holders)
        assert pool.num_used + pool.num_free == pool.num_blocks
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots)
        for request in scheduler.running:
            self.check_hashes(request)

    def check_hashes(self, request: object) -> None:
        """A block that is known by a hash holds the tokens of that hash."""
        pool, block_size = self.scheduler.blocks.pool, self.scheduler.blocks.block_size
        parent = ROOT_HASH
        for index, block_id in enumerate(request.block_ids):  # type: ignore[attr-defined]
            chunk = request.token_ids[index * block_size : (index + 1) * block_size]  # type: ignore[attr-defined]
            salt = request.cache_salt  # type: ignore[attr-defined]
            extra = [("cache_salt", salt)] if index == 0 and salt else []
            parent = hash_block(parent, chunk, extra)
            if pool.hash_of(block_id) is not None:
                assert pool.hash_of(block_id) == parent
                places = [(block_id, offset) for offset in range(block_size)]
                assert [self.executor._cache[place] for place in places] == chunk

    def check_end(self) -> None:
        assert not self.engine.has_unfinished_requests(), "some request never ends"
        assert self.scheduler.blocks.pool.num_used == 0
        assert sorted(self.scheduler._free_slots) == list(range(self.executor.num_slots))
        assert set(self.reasons) | self.aborted == set(self.requests)
        for name, request in self.requests.items():
            expected = expected_output(
                request.prompt_token_ids, request.sampling_params.max_tokens or 0
            )
            if self.reasons.get(name) == "length":
                assert self.tokens[name] == expected
            else:  # aborted, or part of a step that failed
                assert self.tokens[name] == expected[: len(self.tokens[name])]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_simulation(seed: int) -> None:
    Simulation(seed).run()


def test_simulations_do_preempt_share_and_fail() -> None:
    """The generator reaches what it is there to reach."""
    seen = {"preemptions": 0, "hits": 0, "error": 0, "length": 0, "aborted": 0}
    for seed in range(40):
        simulation = Simulation(seed)
        simulation.run()
        stats = simulation.scheduler.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["hits"] += stats.prefix_cache_hits
        seen["aborted"] += len(simulation.aborted)
        for reason in simulation.reasons.values():
            seen[reason] += 1
    assert all(seen.values()), seen
