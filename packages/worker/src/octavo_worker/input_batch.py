"""The persistent batch: what the worker knows of each slot."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo_core.sampling_params import GREEDY_TEMPERATURE, SEED_BITS, SamplingParams
from octavo_core.scheduler_output import NewRequestData, SchedulerOutput
from octavo_worker.logits_rules import LogitsRules

_FIRST_TOKENS = 1024  # columns of the token table at first


class InputBatch:
    """State of ``max_num_seqs`` slots, kept from step to step.

    The tables start narrow and widen with the longest request, so that a large
    ``max_model_len`` costs no memory before it is used.

    Attributes:
        token_ids: ``[max_num_seqs, capacity]`` int32, known tokens.
        num_tokens: ``[max_num_seqs]`` int64, how many of them are known.
        num_prompt_tokens: ``[max_num_seqs]`` int64.
        block_tables: For each KV group ``[max_num_seqs, capacity]`` int32, in order the numbers
            that blocks have in the caches.
        block_step: What a block's id is multiplied by to get that number.
        num_blocks: ``[max_num_seqs]`` int64, of each group.
        num_blocks_reached: Blocks of the pool up to the last that a slot has had, of any group.
        temperature, top_p, min_p: ``[max_num_seqs]`` float32. A temperature too low to be told
            from none is 0.
        log_min_p: ``[max_num_seqs]`` float32, logarithm of ``min_p``.
        top_k: ``[max_num_seqs]`` int32, 0 for off.
        seeds: ``[max_num_seqs]`` int64.
        num_logprobs: ``[max_num_seqs]`` int32, alternatives to report; -1 for no logprobs.
        num_prompt_logprobs: The same for the tokens of a prompt that is computed the first
            time; one that comes back with tokens of an answer was reported on before.
        logprob_token_ids: By slot, the tokens to report in place of the likeliest ones.
        rules: Penalties, biases, and tokens that are allowed or forbidden.
    """

    def __init__(self, max_num_seqs: int, block_size: int, num_groups: int = 1) -> None:
        self.token_ids = np.zeros((max_num_seqs, _FIRST_TOKENS), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        first_blocks = -(-_FIRST_TOKENS // block_size)
        self.block_tables = [
            np.zeros((max_num_seqs, first_blocks), np.int32) for _ in range(num_groups)
        ]
        self.block_step = 1
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_blocks_reached = 0
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.log_min_p = np.full(max_num_seqs, -np.inf, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.logprob_token_ids: dict[int, NDArray[np.int64]] = {}
        self.rules = LogitsRules(max_num_seqs)
        # Slots that want more of their logits than a token, and those that want a prompt's.
        self._wants_logits: set[int] = set()
        self._wants_prompt_logprobs: set[int] = set()

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Bring the slots to the state that a step starts from."""
        for slot in scheduler_output.freed_slots:
            self._free(slot)
        for request in scheduler_output.new_requests:
            self._add(request)
        for slot, block_ids in scheduler_output.new_block_ids:
            self._append_blocks(slot, block_ids)
        for slot, token_ids in scheduler_output.forced_tokens:
            self._append_known(slot, token_ids)

    def needs_logits(self, slots: Iterable[int]) -> bool:
        """Whether one of `slots` has rules, is under a grammar or wants log-probabilities."""
        return bool(self._wants_logits) and not self._wants_logits.isdisjoint(slots)

    def needs_prompt_logits(self, slots: Iterable[int]) -> bool:
        """Whether one of `slots` wants log-probabilities of its prompt."""
        wants = self._wants_prompt_logprobs
        return bool(wants) and not wants.isdisjoint(slots)

    def reserve(self, num_tokens: int) -> None:
        """Have room for so many tokens of each slot."""
        self.token_ids = _widen(self.token_ids, num_tokens)

    def append_tokens(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append one sampled token to each of `slots`."""
        if len(slots) == 0:
            return
        ends = self.num_tokens[slots]
        self.reserve(int(ends.max()) + 1)
        self.token_ids[slots, ends] = token_ids
        self.num_tokens[slots] += 1

    def _append_known(self, slot: int, token_ids: list[int]) -> None:
        first = int(self.num_tokens[slot])
        last = first + len(token_ids)
        self.reserve(last)
        self.token_ids[slot, first:last] = token_ids
        self.num_tokens[slot] = last

    def _free(self, slot: int) -> None:
        self.rules.clear(slot)
        self.num_tokens[slot] = 0
        self.num_prompt_logprobs[slot] = -1
        self.logprob_token_ids.pop(slot, None)
        self._wants_logits.discard(slot)
        self._wants_prompt_logprobs.discard(slot)
        self.num_blocks[slot] = 0

    def _add(self, request: NewRequestData) -> None:
        self._free(request.slot)
        slot, num_tokens = request.slot, len(request.token_ids)
        self._append_known(slot, request.token_ids)
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_blocks[slot] = 0
        self._append_blocks(slot, request.block_tables)
        self._set_sampling_params(slot, request.sampling_params)
        wanted = request.sampling_params.prompt_logprobs
        if wanted is not None and num_tokens == request.num_prompt_tokens:
            self.num_prompt_logprobs[slot] = wanted
            self._wants_prompt_logprobs.add(slot)

    def _append_blocks(self, slot: int, block_ids: list[list[int]]) -> None:
        """Append blocks to each group's table; as many for each."""
        if not block_ids:  # an encoder's
            return
        first = int(self.num_blocks[slot])
        last = first + len(block_ids[0])
        for group, added in enumerate(block_ids):
            table = _widen(self.block_tables[group], last)
            table[slot, first:last] = added
            table[slot, first:last] *= self.block_step
            self.block_tables[group] = table
            self.num_blocks_reached = max(self.num_blocks_reached, max(added, default=-1) + 1)
        self.num_blocks[slot] = last

    def _set_sampling_params(self, slot: int, params: SamplingParams) -> None:
        self.rules.set(slot, params)
        is_greedy = params.temperature < GREEDY_TEMPERATURE
        self.temperature[slot] = 0 if is_greedy else params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
        self.min_p[slot] = params.min_p
        # In float64, of the float32, as `octavo_kernels.sample` takes it.
        min_p = float(self.min_p[slot])
        self.log_min_p[slot] = math.log(min_p) if min_p > 0 else -np.inf
        seed = params.seed
        self.seeds[slot] = secrets.randbits(SEED_BITS) if seed is None else seed
        self.num_logprobs[slot] = -1 if params.num_logprobs is None else params.num_logprobs
        if params.logprob_token_ids is not None:
            self.logprob_token_ids[slot] = np.array(params.logprob_token_ids, np.int64)
        if (
            self.rules.has_any(slot)
            or params.num_logprobs is not None
            or params.structured_outputs is not None
        ):
            self._wants_logits.add(slot)


def _widen(table: NDArray[Any], columns: int) -> NDArray[Any]:
    """Return `table`, or a copy with at least `columns` columns, doubled to keep growth rare."""
    rows, capacity = table.shape
    if columns <= capacity:
        return table
    # Zeroed memory from the system is not touched until it is used.
    wider = np.zeros((rows, max(columns, 2 * capacity)), table.dtype)
    wider[:, :capacity] = table
    return wider
