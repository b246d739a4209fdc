"""An executor without a model, for tests of scheduling.

Its token is a hash of everything before it. Where a model keeps K and V it keeps token ids,
and checks that attention would read the right ones through the block tables that the
scheduler handed out. So a wrong block, position or slot is found out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreRequest, TokenLogprobs
from support.fake_grammar import FakeMatcher

VOCAB_SIZE = 1000


def tiny_spec(max_position_embeddings: int = 4096) -> ModelSpec:
    """A model so small that a KV block has few bytes."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=max_position_embeddings,
    )


def make_request(
    request_id: str, prompt: list[int] | int, max_tokens: int = 4, **fields: Any
) -> EngineCoreRequest:
    """A request; a number as prompt means that many tokens that nobody else has.

    Fields of `SamplingParams` and of `EngineCoreRequest` may be given.
    """
    if isinstance(prompt, int):
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little")
        prompt = [(seed + 7 * i) % VOCAB_SIZE for i in range(prompt)]
    names = set(EngineCoreRequest.__struct_fields__)
    params = {name: value for name, value in fields.items() if name not in names}
    rest = {name: value for name, value in fields.items() if name in names}
    return EngineCoreRequest(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, **params), **rest
    )


def next_token(token_ids: list[int], allowed: Sequence[int] | None = None) -> int:
    """The token that this "model" puts after `token_ids`, of those that are `allowed`."""
    text = ",".join(map(str, token_ids)).encode()
    drawn = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    return drawn % VOCAB_SIZE if allowed is None else allowed[drawn % len(allowed)]


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request gets when it runs alone."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def expected_constrained_output(
    prompt: list[int], max_tokens: int, matcher: FakeMatcher, end_ids: Sequence[int] = ()
) -> list[int]:
    """What a request under a grammar gets when it runs alone."""
    output: list[int] = []
    while True:
        token_id = next_token(prompt + output, sorted(matcher.allowed()))
        new = [token_id]
        if token_id not in end_ids:
            matcher.accept_tokens(new)
            new += matcher.take_forced_tokens()
        for token_id in new:
            output.append(token_id)
            if len(output) == max_tokens or token_id in end_ids:
                return output
        if matcher.is_terminated:
            return output


def _masks_by_slot(grammar: GrammarOutput | None) -> dict[int, list[int]]:
    """The allowed tokens of each slot that a grammar names."""
    if grammar is None:
        return {}
    width = len(grammar.bitmask) // len(grammar.slots)
    found = {}
    for index, slot in enumerate(grammar.slots):
        bits = int.from_bytes(grammar.bitmask[index * width : (index + 1) * width], "little")
        found[slot] = [token_id for token_id in range(VOCAB_SIZE) if bits >> token_id & 1]
    return found


class ViolationError(BaseException):
    """The scheduler broke its contract. Not an Exception: the engine must not survive it."""


def require(condition: bool, what: str) -> None:
    """Raise unless the contract holds."""
    if not condition:
        raise ViolationError(what)


class LazyFuture(Future[ModelRunnerOutput]):
    """A future that has its executor catch up when somebody waits for it."""

    def __init__(self, catch_up: Callable[[LazyFuture], None]) -> None:
        super().__init__()
        self._catch_up = catch_up

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._catch_up(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._catch_up(self)
        return super().exception(timeout)


class FakeExecutor:
    """Keeps token ids where a model keeps K and V.

    Steps are carried out in order, as late as possible: when one is waited for.

    Args:
        windows: For each KV group its window, None for full attention.

    Attributes:
        fail_next_step: The next step that is carried out raises.
        poison: Ids of requests that make every step fail that has them in it.
    """

    device = "fake"
    dtype = "float32"
    kv_cache_dtype = "float32"
    device_memory: int | None = None

    def __init__(
        self,
        block_size: int,
        num_slots: int,
        max_concurrent_steps: int = 1,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.num_slots = num_slots
        self.max_concurrent_steps = max_concurrent_steps
        self.fail_next_step = False
        self.num_injected = 0
        self.poison: set[str] = set()
        self.is_shut_down = False
        self.max_tokens_in_a_step = 0
        self.num_steps = 0
        self.num_swaps = 0
        # Contents by (block, offset); what nobody has written is not there.
        self.cache: dict[tuple[int, int], int] = {}
        self.host_cache: dict[tuple[int, int], int] = {}
        self._names: dict[int, str] = {}  # by slot
        self._token_ids: dict[int, list[int]] = {}
        self._block_tables: dict[int, list[list[int]]] = {}
        self._reported: dict[int, int] = {}  # prompts to report on, and their length
        self._due: deque[tuple[SchedulerOutput, LazyFuture]] = deque()
        self._grammars: dict[int, GrammarOutput] = {}  # by step
        self.num_masks = 0
        self.num_forced_tokens = 0
        self.num_resumed_under_a_grammar = 0
        self._doomed: set[LazyFuture] = set()

    def load_model(self, on_progress: ProgressCallback) -> None:
        on_progress("loading", 1.0)

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks

    def warm_up(self, on_progress: ProgressCallback) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._due.append((scheduler_output, LazyFuture(self._catch_up)))

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        scheduler_output, future = self._due[-1]
        if grammar is not None:
            require(set(grammar.slots) <= set(scheduler_output.slots), "a mask for nobody")
            self._grammars[scheduler_output.step_id] = grammar
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _catch_up(self, wanted: LazyFuture) -> None:
        while not wanted.done():
            step, future = self._due.popleft()
            try:
                if future in self._doomed:
                    self._run_in_vain(step)
                future.set_result(self._run(step))
            except RuntimeError as error:
                future.set_exception(error)
                self._doomed = {later for _, later in self._due}

    def _run_in_vain(self, step: SchedulerOutput) -> None:
        """Do what a worker does that has not heard yet that the step before has failed."""
        self.num_steps += 1
        self._apply(step, in_vain=True)
        self._swap(step)
        raise RuntimeError("an earlier step has failed")

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        if self.fail_next_step and step.step_id % 2:  # before anything of it was done
            self._fail()
        self._apply(step)
        if self.fail_next_step:  # after its slots were told
            self._fail()
        self._swap(step)
        rows = list(
            zip(step.slots, step.num_scheduled_tokens, step.num_computed_tokens, strict=True)
        )
        self.max_tokens_in_a_step = max(self.max_tokens_in_a_step, sum(step.num_scheduled_tokens))
        for slot in step.slots:
            if self._names.get(slot) in self.poison:
                raise RuntimeError("poison")
        self._check_known(rows)
        written: set[tuple[int, int]] = set()
        for slot, count, start in rows:  # all K and V before any attention, as in a model
            for position in range(start, start + count):
                for table in self._block_tables[slot]:
                    place = self._place(table, position)
                    require(place not in written, "one cache slot written twice in a step")
                    written.add(place)
                    self.cache[place] = self._token_ids[slot][position]
        reports = {index: self._report(*row) for index, row in enumerate(rows)}
        masks = _masks_by_slot(self._grammars.pop(step.step_id, None))
        self.num_masks += len(masks)
        sampled = [self._sample(*row, masks.pop(row[0], None)) for row in rows]
        require(not masks, "a mask for a slot that samples nothing")
        given = {index: entries for index, entries in reports.items() if entries}
        return ModelRunnerOutput(step.step_id, sampled, {}, given)

    def _fail(self) -> None:
        self.fail_next_step = False
        self.num_injected += 1
        raise RuntimeError("injected")

    def _apply(self, step: SchedulerOutput, in_vain: bool = False) -> None:
        for slot in step.freed_slots:
            self._token_ids.pop(slot, None)
            self._block_tables.pop(slot, None)
            self._names.pop(slot, None)
        for request in step.new_requests:
            require(0 <= request.slot < self.num_slots, "no such slot")
            require(in_vain or request.slot not in self._token_ids, "slot used twice")
            if request.sampling_params.structured_outputs and (
                len(request.token_ids) > request.num_prompt_tokens
            ):
                self.num_resumed_under_a_grammar += 1
            self._names[request.slot] = request.request_id
            self._token_ids[request.slot] = list(request.token_ids)
            self._block_tables[request.slot] = [list(table) for table in request.block_tables]
            self._reported.pop(request.slot, None)
            wanted = request.sampling_params.prompt_logprobs
            if wanted is not None and len(request.token_ids) == request.num_prompt_tokens:
                self._reported[request.slot] = request.num_prompt_tokens
        for slot, block_ids in step.new_block_ids:
            for table, added in zip(self._block_tables.get(slot, []), block_ids, strict=False):
                table += added  # no table is there if a step before this one has failed
        for slot, token_ids in step.forced_tokens:
            self.num_forced_tokens += len(token_ids)
            self._token_ids.get(slot, []).extend(token_ids)
        require(len(set(step.slots)) == len(step.slots), "a slot scheduled twice")

    def _check_known(self, rows: list[tuple[int, int, int]]) -> None:
        """Raise where a model would, because the step before this one has failed."""
        for slot, count, start in rows:
            known = len(self._token_ids.get(slot, ()))
            room = len(self._block_tables.get(slot, [()])[0]) * self.block_size
            if start + count > known or start + count > room:
                raise RuntimeError(f"slot {slot} has no token {start + count - 1}")

    def _swap(self, step: SchedulerOutput) -> None:
        self.num_swaps += len(step.blocks_to_swap_out) + len(step.blocks_to_swap_in)
        for source, target in step.blocks_to_swap_out:
            require(0 <= target < self.num_host_blocks, "no such host block")
            self._copy(self.cache, source, self.host_cache, target)
        for source, target in step.blocks_to_swap_in:
            self._copy(self.host_cache, source, self.cache, target)

    def _copy(
        self,
        source: dict[tuple[int, int], int],
        source_block: int,
        target: dict[tuple[int, int], int],
        target_block: int,
    ) -> None:
        for offset in range(self.block_size):
            content = source.get((source_block, offset))
            if content is None:
                target.pop((target_block, offset), None)
            else:
                target[target_block, offset] = content

    def _report(self, slot: int, count: int, start: int) -> list[TokenLogprobs]:
        """Report on the prompt tokens that follow those computed: their rank is their position."""
        end = min(start + count, self._reported.get(slot, 0) - 1)
        return [
            TokenLogprobs([self._token_ids[slot][position + 1]], [-1.0], position + 1)
            for position in range(start, end)
        ]

    def _sample(self, slot: int, count: int, start: int, allowed: list[int] | None) -> int:
        token_ids = self._token_ids[slot]
        end = start + count
        self._check_seen(slot, start, end)
        if end < len(token_ids):
            require(allowed is None, "a mask where nothing is sampled")
            return -1
        token_ids.append(next_token(token_ids, allowed))
        return token_ids[-1]

    def _check_seen(self, slot: int, start: int, end: int) -> None:
        """Every group has to hold all that its attention reads for these queries."""
        token_ids = self._token_ids[slot]
        for table, window in zip(self._block_tables[slot], self.windows, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            seen = [self.cache.get(self._place(table, position)) for position in range(first, end)]
            require(seen == token_ids[first:end], f"slot {slot} reads another's KV")

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        block_id = table[position // self.block_size]
        require(0 <= block_id < self.num_blocks, "no such block")
        return block_id, position % self.block_size
