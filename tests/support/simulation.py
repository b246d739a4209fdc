"""Deterministic simulation of an engine: arrivals, aborts, failures, all from one seed.

After every event the invariants of the design hold; at the end every request has ended
once, with the tokens it gets when it runs alone, and the pool is as it was.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from octavo_core.block_hash import ROOT_HASH, hash_block
from octavo_core.block_manager import HOLE, BlockManager
from octavo_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo_core.engine_core import EngineCore
from octavo_core.grammar_compiler import GrammarCompiler, Work
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from octavo_core.policies import FCFSPolicy, SchedulingPolicy
from octavo_core.request import Request
from octavo_core.scheduler import Scheduler
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_core.wire import EngineCoreRequest, MediaSpan
from support.engine_fakes import (
    FakeExecutor,
    expected_constrained_output,
    expected_output,
    make_request,
    tiny_spec,
)
from support.fake_grammar import EOS_TOKEN_ID, FakeGrammarBackend, FakeMatcher

FAULTS = ("unsupported", "broken", "fill", "accept", "complex")
PolicyChoice = Callable[[random.Random], SchedulingPolicy]


class Simulation:
    """One engine with random settings, and random events.

    Args:
        seed: Decides everything.
        choose_policy: Makes the scheduling policy.
    """

    def __init__(self, seed: int, choose_policy: PolicyChoice | None = None) -> None:
        self.random = random.Random(seed)
        choice, randint, chance = self.random.choice, self.random.randint, self.random.random
        self.block_size = choice([1, 2, 4, 16])
        self.max_model_len = randint(20, 120)
        self.num_slots = randint(1, 8)
        self.budget = randint(1, 60)
        self.windows = choice([(None,), (None,), (None,), (None, 7), (5,), (16, None, 3)])
        groups = [KVCacheGroup((i,), window) for i, window in enumerate(self.windows)]
        depth = choice([1, 1, 2, 3])
        # Always room for one request of the greatest length.
        min_blocks = -(-self.max_model_len // self.block_size) * len(groups)
        config = EngineConfig(
            model=ModelConfig(max_model_len=self.max_model_len),
            cache=CacheConfig(
                block_size=self.block_size, num_gpu_blocks_override=self.max_model_len
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=self.budget,
                max_num_seqs=self.num_slots,
                long_prefill_token_threshold=choice([0, 3, 20]),
                max_num_queued_reqs=choice([3, 4096]),
                max_num_queued_tokens=choice([0, 0, 100]),
                batch_queue_size=depth,
            ),
        )
        self.executor = FakeExecutor(self.block_size, self.num_slots, windows=self.windows)
        self.compiling: deque[tuple[Work, Future[Any]]] = deque()
        self.grammars = GrammarCompiler(FakeGrammarBackend(), self.submit, max_wait=0)
        self.engine = EngineCore(config, tiny_spec(), self.executor, self.grammars)
        self.engine.start(lambda stage, progress: None)
        self.blocks = BlockManager(
            randint(min_blocks, 3 * min_blocks),
            self.block_size,
            chance() < 0.85,
            groups=groups,
            num_host_blocks=choice([0, 0, 3, 40]),
            max_step_tokens=self.budget,
            record_events=True,
        )
        self.executor.initialize_kv_cache(self.blocks.pool.num_blocks, self.blocks.host.num_blocks)
        policy = choose_policy(self.random) if choose_policy else FCFSPolicy()
        self.scheduler = Scheduler(config.scheduler, self.blocks, self.max_model_len, policy)
        self.engine._scheduler = self.scheduler
        self.prefixes = [[randint(0, 999) for _ in range(randint(1, 60))] for _ in range(3)]
        self.requests: dict[str, EngineCoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.poisoned: set[str] = set()
        self.cached: set[tuple[bytes, int, str]] = set()  # as the events tell it

    def run(self) -> None:
        """Let random events happen, stop the faults, and wait for the end."""
        for _ in range(self.random.randint(20, 80)):
            event = self.random.random()
            if event < 0.35:
                self.arrive()
            elif event < 0.42:
                self.abort()
            elif event < 0.45:
                self.executor.fail_next_step = True
            elif event < 0.46:
                self.poison()
            elif event < 0.47:
                self.engine.reset_prefix_cache()
            elif event < 0.49:
                self.expire()
            elif event < 0.55:
                self.compile_one()
            else:
                self.step()
            self.check_invariants()
        self.executor.fail_next_step = False
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests():
                break
            self.compile_one()
            self.step()
            self.check_invariants()
        self.check_end()

    # Grammars

    def submit(self, work: Work) -> Future[Any]:
        """Compile later."""
        self.compiling.append((work, Future()))
        return self.compiling[-1][1]

    def compile_one(self) -> None:
        """The grammar that waits longest is compiled."""
        if self.compiling:
            work, future = self.compiling.popleft()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def some_grammar(self) -> StructuredOutputsParams | None:
        """A constraint for every third request; few of them are no good."""
        chance = self.random.random
        if chance() < 0.67:
            return None
        fault = self.random.choice(FAULTS) if chance() < 0.2 else ""
        return StructuredOutputsParams(regex=f"{self.random.randint(0, 20)} {fault}")

    # Events

    def arrive(self) -> None:
        """A request with a random length, and perhaps a shared prefix."""
        choice, randint = self.random.choice, self.random.randint
        prefix = choice(self.prefixes)
        prompt = prefix[: randint(0, len(prefix))]
        prompt = prompt + [randint(0, 999) for _ in range(randint(1, 30))]
        prompt = prompt[: self.max_model_len - 1]
        max_tokens = randint(1, self.max_model_len - len(prompt))
        grammar = self.some_grammar()
        stop = None
        if grammar is None and self.random.random() < 0.3:
            stop = expected_output(prompt, max_tokens)[-1]
        name = f"r{len(self.requests)}"
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens + (2 if stop else 0),
            cache_salt=choice([None, None, "tenant"]),
            priority=randint(-2, 2),
            tenant=choice([None, "a", "b"]),
            adapter=choice([None, None, None, "tenant"]),
            media=choice([[], [], [], [MediaSpan("picture", 2, 5)]]),
            deadline=1e18 if self.random.random() < 0.1 else None,
            stop_token_ids=(stop,) if stop else (),
            eos_token_ids=(EOS_TOKEN_ID,) if grammar and self.random.random() < 0.8 else (),
            structured_outputs=grammar,
        )
        if grammar is not None and self.random.random() < 0.2:  # resumed from another engine
            known = alone(request)[: randint(0, max_tokens - 1)]
            while known and not is_resumable(request, known):
                known.pop()
            request = msgspec.structs.replace(request, output_token_ids=known)
            self.tokens[name] = list(known)
        self.requests[name] = request
        self.tokens.setdefault(name, [])
        self.engine.add_request(request)

    def alive(self) -> list[str]:
        """Requests that have not ended."""
        return [
            name
            for name in self.requests
            if name in self.scheduler._requests or name in self.engine._compiling
        ]

    def abort(self) -> None:
        """A client leaves."""
        alive = self.alive()
        if alive:
            name = self.random.choice(alive)
            self.aborted.add(name)
            self.engine.abort_requests([name])

    def poison(self) -> None:
        """A request starts to make every step fail."""
        alive = self.alive()
        if alive:
            self.poisoned.add(self.random.choice(alive))
            self.executor.poison = self.poisoned

    def expire(self) -> None:
        """The time of all requests that have a deadline is over."""
        self.take(self.scheduler.expire(2e18))

    def step(self) -> None:
        """One turn of the engine."""
        self.take(self.engine.step().outputs)
        assert self.executor.max_tokens_in_a_step <= self.budget

    def take(self, outputs: list) -> None:
        """Be the client."""
        for output in outputs:
            name = output.request_id
            assert name not in self.aborted
            assert name not in self.reasons, "a request ended twice"
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[name] = output.finish_reason
                self.errors[name] = output.error_kind

    # Checks

    def check_invariants(self) -> None:
        """What holds after every event."""
        scheduler, pool = self.scheduler, self.blocks.pool
        holders = [0] * pool.num_blocks
        for request in scheduler.running:
            for table, num_holes in zip(request.block_tables, request.num_holes, strict=True):
                assert table[:num_holes] == [HOLE] * num_holes
                for block_id in table[num_holes:]:
                    holders[block_id] += 1
            held = sum(map(len, request.block_tables)) - sum(request.num_holes)
            assert held <= self.blocks.most_blocks_held(
                len(request.block_tables[0]) * self.block_size
            )
        assert holders == [pool.ref_count(i) for i in range(pool.num_blocks)]
        assert pool.num_used == sum(count > 0 for count in holders)
        assert pool.num_used + pool.num_free == pool.num_blocks
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert sorted(slots + scheduler._free_slots) == list(range(self.num_slots))
        waiting = [request for request in scheduler._requests.values() if request.slot < 0]
        assert len(waiting) == scheduler.num_waiting
        assert scheduler.stats().num_waiting_tokens == sum(r.num_tokens for r in waiting)
        if scheduler.num_steps_in_flight == 0 and self.random.random() < 0.3:  # it is slow
            for request in scheduler.running:
                self.check_contents(request)
        self.check_events()

    def check_contents(self, request: Request) -> None:
        """A block that is known by a key holds the tokens of that key."""
        parent = ROOT_HASH
        for index in range(len(request.token_ids) // self.block_size):
            start = index * self.block_size
            chunk = request.token_ids[start : start + self.block_size]
            parent = hash_block(parent, chunk, expected_extra_keys(request, start, self.block_size))
            for group, table in enumerate(request.block_tables):
                if index >= len(table) or table[index] == HOLE:
                    continue
                key = self.blocks.pool.key_of(table[index])
                if key is not None:
                    assert key == parent + (bytes([group]) if group else b"")
                    places = [(table[index], offset) for offset in range(self.block_size)]
                    assert [self.executor.cache[place] for place in places] == chunk

    def check_events(self) -> None:
        """Who listens to the events knows what is cached on the device."""
        for event in self.blocks.take_events():
            if isinstance(event, BlockStored):
                (block_hash,) = event.block_hashes
                assert (block_hash, event.group, event.medium) not in self.cached
                self.cached.add((block_hash, event.group, event.medium))
            elif isinstance(event, BlockRemoved):
                (block_hash,) = event.block_hashes
                self.cached.remove((block_hash, event.group, event.medium))
            else:
                assert isinstance(event, AllBlocksCleared)
                self.cached.clear()
        on_device = {(entry[0], entry[1]) for entry in self.cached if entry[2] == "gpu"}
        assert len(on_device) == self.blocks.pool.num_cached
        assert len(self.cached) - len(on_device) == self.blocks.host.num_used

    def check_end(self) -> None:
        """What holds once all requests have ended."""
        assert not self.engine.has_unfinished_requests(), "some request never ends"
        assert self.blocks.pool.num_used == 0
        assert sorted(self.scheduler._free_slots) == list(range(self.num_slots))
        assert set(self.reasons) | self.aborted == set(self.requests)
        for name, request in self.requests.items():
            expected = alone(request)
            if self.reasons.get(name) in ("length", "stop"):
                assert self.tokens[name] == expected
            else:  # aborted, refused, expired or poisonous
                assert self.tokens[name] == expected[: len(self.tokens[name])]
            if self.errors.get(name) == "RequestFailedError":
                # Who fails alone is a culprit: by bad luck, if another fault happens just then.
                innocent = name not in self.poisoned and not has_fault(request)
                assert not innocent or self.executor.num_injected, "an innocent was failed"


def alone(request: EngineCoreRequest) -> list[int]:
    """What a request gets when it runs alone."""
    params = request.sampling_params
    if params.structured_outputs is not None:
        # A matcher that does not fail: what comes before the failure is right as well.
        matcher = FakeMatcher(str(params.structured_outputs.regex).split()[0])
        return expected_constrained_output(
            request.prompt_token_ids, params.max_tokens or 0, matcher, params.eos_token_ids
        )
    tokens = expected_output(request.prompt_token_ids, params.max_tokens or 0)
    for index, token in enumerate(tokens):
        if token in params.stop_token_ids:
            return tokens[: index + 1]
    return tokens


def has_fault(request: EngineCoreRequest) -> bool:
    """True if its grammar is made to fail."""
    params = request.sampling_params.structured_outputs
    return params is not None and any(fault in str(params.regex) for fault in FAULTS)


def is_resumable(request: EngineCoreRequest, known: list[int]) -> bool:
    """True if an engine can have told these tokens and no more: forced ones come all at once."""
    matcher = FakeMatcher(str(request.sampling_params.structured_outputs.regex).split()[0])
    output: list[int] = []
    while len(output) < len(known):
        new = [known[len(output)]]
        matcher.accept_tokens(new)
        output += new + matcher.take_forced_tokens()
    return output == known and not matcher.is_terminated


def expected_extra_keys(request: Request, start: int, block_size: int) -> list[tuple]:
    """The extra keys of one block, worked out independently."""
    keys: list[tuple] = []
    if start == 0:
        keys += [("adapter", request.adapter)] if request.adapter else []
        keys += [("cache_salt", request.cache_salt)] if request.cache_salt else []
    for span in request.media:
        overlap = set(range(span.start, span.start + span.length)) & set(
            range(start, start + block_size)
        )
        keys += [("media", span.digest, span.start - start)] if overlap else []
    return keys


def run_seeds(seeds: range) -> None:
    """Simulate each seed; an error says how to see it again."""
    for seed in seeds:
        try:
            Simulation(seed).run()
        except BaseException as error:
            error.add_note(f"to see it again: nox -s sim -- --seeds 1 --first {seed}")
            raise
