"""From logits to tokens, for the rows of one step."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_core.sampling_params import GREEDY_TEMPERATURE
from octavo_core.scheduler_output import GrammarOutput
from octavo_core.wire import TokenLogprobs
from octavo_kernels import SamplingMetadata, compute_logprobs, sample
from octavo_worker.input_batch import InputBatch

# What minus infinity is reported as, since JSON has no word for it.
MIN_LOGPROB = -9999.0


def sample_rows(
    logits: Tensor,
    batch: InputBatch,
    slots: NDArray[np.int64],
    grammar: GrammarOutput | None = None,
) -> tuple[NDArray[np.int64], dict[int, TokenLogprobs]]:
    """Sample the next token of each row.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, as the model gave them.
        batch: Tokens and sampling parameters, by slot.
        slots: ``[num_rows]``, the slot of each row.
        grammar: Which tokens are allowed, for slots under structured output.

    Returns:
        Token ids ``[num_rows]``, and log-probabilities by row for those that asked.
    """
    allowed = _mask_early_ends(logits, batch, slots)
    if grammar is not None:
        allowed = _mask_grammar(allowed, slots, grammar)
    token_ids = sample(allowed, _sampling_metadata(batch, slots))
    logprobs = _token_logprobs(logits, token_ids, batch, slots)
    return token_ids.cpu().numpy(), logprobs


def _sampling_metadata(batch: InputBatch, slots: NDArray[np.int64]) -> SamplingMetadata:
    temperature = batch.temperature[slots]
    temperature = np.where(temperature < GREEDY_TEMPERATURE, 0, temperature)
    return SamplingMetadata(
        temperature=temperature.astype(np.float32),
        top_k=batch.top_k[slots],
        top_p=batch.top_p[slots],
        min_p=batch.min_p[slots],
        seeds=batch.seeds[slots],
        # The token's own index: the same alone, in a crowd, and after a preemption.
        positions=batch.num_tokens[slots],
    )


def _mask_early_ends(logits: Tensor, batch: InputBatch, slots: NDArray[np.int64]) -> Tensor:
    """Forbid ending tokens to rows that have not reached their ``min_tokens``."""
    num_output_tokens = batch.num_tokens[slots] - batch.num_prompt_tokens[slots]
    early_rows = np.flatnonzero(num_output_tokens < batch.min_tokens[slots]).tolist()
    if not early_rows:
        return logits
    logits = logits.clone()
    for row in early_rows:
        params = batch.sampling_params[int(slots[row])]
        ends = {*params.eos_token_ids, *params.stop_token_ids}
        logits[row, [token_id for token_id in ends if token_id < logits.shape[-1]]] = -math.inf
    return logits


def _mask_grammar(logits: Tensor, slots: NDArray[np.int64], grammar: GrammarOutput) -> Tensor:
    """Forbid the tokens whose bits are not set, to the slots that the grammar names."""
    row_of = {slot: row for row, slot in enumerate(slots.tolist())}
    bits = np.frombuffer(grammar.bitmask, np.uint8).reshape(len(grammar.slots), -1)
    bits = np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little")
    logits = logits.clone()
    for slot, allowed in zip(grammar.slots, torch.from_numpy(bits), strict=True):
        if slot in row_of:
            logits[row_of[slot]].masked_fill_(allowed.to(logits.device) == 0, -math.inf)
    return logits


def _token_logprobs(
    logits: Tensor, token_ids: Tensor, batch: InputBatch, slots: NDArray[np.int64]
) -> dict[int, TokenLogprobs]:
    wanted = {
        row: count
        for row, slot in enumerate(slots.tolist())
        if (count := batch.sampling_params[slot].logprobs) is not None
    }
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits.device)
    found = compute_logprobs(logits[rows], token_ids[rows], max(wanted.values()))
    # The sampled token first, then the likeliest ones; [num_wanted, 1 + num_top].
    ids = torch.cat((token_ids[rows].unsqueeze(-1), found.top_token_ids), dim=-1).tolist()
    logprobs = torch.cat((found.sampled.unsqueeze(-1), found.top), dim=-1)
    values = logprobs.clamp_(min=MIN_LOGPROB).tolist()
    ranks = found.ranks.tolist()
    return {
        row: TokenLogprobs(ids[index][: 1 + count], values[index][: 1 + count], ranks[index])
        for index, (row, count) in enumerate(wanted.items())
    }
