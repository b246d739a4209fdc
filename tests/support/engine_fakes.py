"""An executor without a model, for tests of scheduling.

Its token is a hash of everything before it, read back through the block tables that the
scheduler handed out. So a wrong block, position or slot shows up as a wrong token.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future

from octavo_core.executor import ProgressCallback
from octavo_core.model_spec import ModelSpec
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import EngineCoreRequest

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
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int = 4,
    cache_salt: str | None = None,
    **params: object,
) -> EngineCoreRequest:
    """A request; a number as prompt means that many tokens that nobody else has."""
    if isinstance(prompt, int):
        seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:4], "little")
        prompt = [(seed + 7 * i) % VOCAB_SIZE for i in range(prompt)]
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineCoreRequest(request_id, prompt, sampling_params, cache_salt=cache_salt)


def next_token(token_ids: list[int]) -> int:
    """The token that this "model" puts after `token_ids`."""
    text = ",".join(map(str, token_ids)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") % VOCAB_SIZE


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request gets when it runs alone."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class FakeExecutor:
    """Keeps token ids where a model keeps K and V."""

    device = "fake"
    dtype = "float32"

    def __init__(self, block_size: int, num_slots: int) -> None:
        self.block_size = block_size
        self.num_slots = num_slots
        self.fail_next_step = False
        self.is_shut_down = False
        self.max_tokens_in_a_step = 0
        self._cache: dict[tuple[int, int], int] = {}  # (block, offset) -> token id
        self._token_ids: dict[int, list[int]] = {}  # by slot
        self._block_ids: dict[int, list[int]] = {}
        self._output: Future[ModelRunnerOutput] = Future()

    def load_model(self, on_progress: ProgressCallback) -> None:
        on_progress("loading", 1.0)

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def warm_up(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._output = Future()
        try:
            self._output.set_result(self._run(scheduler_output))
        except RuntimeError as error:
            self._output.set_exception(error)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return self._output

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(step)
        if self.fail_next_step:
            self.fail_next_step = False
            raise RuntimeError("injected")
        rows = list(
            zip(step.slots, step.num_scheduled_tokens, step.num_computed_tokens, strict=True)
        )
        self.max_tokens_in_a_step = max(self.max_tokens_in_a_step, sum(step.num_scheduled_tokens))
        written: set[tuple[int, int]] = set()
        for slot, count, start in rows:  # all K and V before any attention, as in a model
            for position in range(start, start + count):
                place = self._place(slot, position)
                assert place not in written, "one cache slot written twice in a step"
                written.add(place)
                self._cache[place] = self._token_ids[slot][position]
        return ModelRunnerOutput(step.step_id, [self._sample(*row) for row in rows])

    def _apply(self, step: SchedulerOutput) -> None:
        for slot in step.freed_slots:
            self._token_ids.pop(slot, None)
            self._block_ids.pop(slot, None)
        for request in step.new_requests:
            assert 0 <= request.slot < self.num_slots
            assert request.slot not in self._token_ids, "slot reused before it was freed"
            self._token_ids[request.slot] = list(request.token_ids)
            self._block_ids[request.slot] = list(request.block_ids)
        for slot, block_ids in step.new_block_ids:
            self._block_ids[slot] += block_ids
        assert len(set(step.slots)) == len(step.slots)

    def _sample(self, slot: int, count: int, start: int) -> int:
        token_ids = self._token_ids[slot]
        end = start + count
        assert end <= len(token_ids)
        if end < len(token_ids):
            return -1
        seen = [self._cache[self._place(slot, position)] for position in range(end)]
        token_ids.append(next_token(seen))
        return token_ids[-1]

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        block_id = self._block_ids[slot][position // self.block_size]
        assert 0 <= block_id < self.num_blocks
        return block_id, position % self.block_size
