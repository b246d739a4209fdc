"""What the scheduler tells the workers in one step, and what they answer.

Rows are addressed by slot: the scheduler owns one of ``max_num_seqs`` batch slots
for each running request, and workers keep that request's state at the same
index. So a decode step sends three short integer lists and no names.
"""

from __future__ import annotations

import msgspec

from octavo_core.pooling_params import PooledOutput, PoolingParams
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import TokenLogprobs


class NewRequestData(msgspec.Struct, frozen=True, array_like=True):
    """All that a worker has to know of a request that enters (or re-enters) a slot.

    Attributes:
        token_ids: Every token known so far: the prompt, and the answer's tokens if
            the request was preempted or is resumed.
        num_prompt_tokens: How many of ``token_ids`` are the prompt.
        block_tables: For each KV group the blocks in order, those of this step's tokens
            included. Where a window has moved on, the id means nothing.
        num_computed_tokens: Tokens whose K and V are in the blocks already
            (prefix-cache hit).
        pooling_params: Set for a request that is pooled, and not sampled for.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_tables: list[list[int]]
    num_computed_tokens: int
    pooling_params: PoolingParams | None = None


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step. A worker applies the fields in this order.

    Attributes:
        step_id: Counts steps from 1.
        freed_slots: Slots whose request ended or was preempted; forget them.
        new_requests: Requests that enter a slot in this step.
        new_block_ids: For requests that were in their slot before, pairs of slot
            and, for each KV group, the block ids to append to its block table.
        slots: Every slot scheduled in this step, new requests included.
        num_scheduled_tokens: For each of ``slots``, how many tokens to compute.
        num_computed_tokens: For each of ``slots``, the position of the first of them.
        blocks_to_swap_out: Pairs of device block and host block to copy to. These come
            first of all, then the next.
        blocks_to_swap_in: Pairs of host block and device block to copy to.
        forced_tokens: Pairs of slot and tokens that a grammar left no choice about: to append
            to the slot's tokens before this step, as if they had been sampled.

    The worker knows every slot's tokens, since it appends what it samples. A token
    is sampled for a slot if this step computes up to its last known token. Steps are
    carried out in order, and may be sent before the tokens of the last one are back.
    """

    step_id: int
    freed_slots: list[int]
    new_requests: list[NewRequestData]
    new_block_ids: list[tuple[int, list[list[int]]]]
    slots: list[int]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    blocks_to_swap_out: list[tuple[int, int]] = []
    blocks_to_swap_in: list[tuple[int, int]] = []
    forced_tokens: list[tuple[int, list[int]]] = []

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of this step, at most ``max_num_batched_tokens``."""
        return sum(self.num_scheduled_tokens)


class GrammarOutput(msgspec.Struct, frozen=True, array_like=True):
    """Allowed tokens for structured output.

    Attributes:
        slots: Slots that are constrained.
        bitmask: ``[len(slots), ceil(vocab_size / 32)]`` int32, little-endian, row by row.
    """

    slots: list[int]
    bitmask: bytes


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced.

    Attributes:
        step_id: The step it answers.
        sampled_token_ids: For each of ``SchedulerOutput.slots`` the sampled token, or
            -1 where the prompt is not finished yet.
        logprobs: Index into ``slots`` to log-probabilities, for rows that asked.
        prompt_logprobs: The same for the prompt tokens that follow those computed: the
            first entry is for position ``num_computed_tokens + 1``.
        pooled: The same for what was pooled of texts whose last token this step computed.
    """

    step_id: int
    sampled_token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: dict[int, PooledOutput] = {}
