"""From logits to tokens, for the rows of one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_core.scheduler_output import GrammarOutput
from octavo_core.wire import TokenLogprobs
from octavo_kernels import (
    SamplingMetadata,
    apply_bitmask,
    sample,
)
from octavo_worker.input_batch import InputBatch
from octavo_worker.token_logprobs import token_logprobs, with_tokens


def sample_rows(
    logits: Tensor,
    batch: InputBatch,
    slots: NDArray[np.int64],
    grammar: GrammarOutput | None = None,
    parameters: Tensor | None = None,
) -> tuple[NDArray[np.int64], dict[int, TokenLogprobs]]:
    """Sample the next token of each row.

    Log-probabilities are taken first, of the logits as they are. Then come the tokens that
    are allowed, bad words, ends that come too early, biases, penalties and the grammar; then
    temperature, min-p, top-k and top-p.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, as the model gave them; may be written into.
        batch: Tokens and sampling parameters, by slot.
        slots: ``[num_rows]``, the slot of each row.
        grammar: Which tokens are allowed, for slots under structured output.
        parameters: What `sampling_metadata` says of them, packed, on the logits' GPU.

    Returns:
        Token ids ``[num_rows]``, and log-probabilities by row for those that asked.
    """
    has_rules = batch.rules.would_change(batch, slots)
    reports_logprobs = bool((batch.num_logprobs[slots] >= 0).any())
    changed = logits
    # Log-probabilities are of the logits as they are, so only beside them a copy is needed.
    if reports_logprobs and (has_rules or grammar is not None):
        changed = logits.clone()
    if has_rules:
        batch.rules.apply(changed, batch, slots)
    if grammar is not None:
        _mask_grammar(changed, slots, grammar)
    token_ids = sample(changed, replace(sampling_metadata(batch, slots), on_device=parameters))
    logprobs = _token_logprobs(logits, token_ids, batch, slots) if reports_logprobs else {}
    return token_ids.cpu().numpy(), logprobs


def sampling_metadata(batch: InputBatch, slots: NDArray[np.int64]) -> SamplingMetadata:
    """Return how the next token of each slot is to be chosen."""
    return SamplingMetadata(
        temperature=batch.temperature[slots],
        top_k=batch.top_k[slots],
        top_p=batch.top_p[slots],
        min_p=batch.min_p[slots],
        seeds=batch.seeds[slots],
        # The token's own index: the same alone, in a crowd, and after a preemption.
        positions=batch.num_tokens[slots],
    )


def _mask_grammar(logits: Tensor, slots: NDArray[np.int64], grammar: GrammarOutput) -> None:
    """Forbid the tokens whose bits are not set, to the slots that the grammar names, in place."""
    row_of = {slot: row for row, slot in enumerate(slots.tolist())}
    masks = np.frombuffer(grammar.bitmask, np.int32).reshape(len(grammar.slots), -1)
    here = [index for index, slot in enumerate(grammar.slots) if slot in row_of]
    rows = [row_of[grammar.slots[index]] for index in here]
    apply_bitmask(
        logits,
        torch.from_numpy(masks[here]).to(logits.device),
        torch.tensor(rows, dtype=torch.int64, device=logits.device),
    )


def _token_logprobs(
    logits: Tensor, token_ids: Tensor, batch: InputBatch, slots: NDArray[np.int64]
) -> dict[int, TokenLogprobs]:
    counts = batch.num_logprobs[slots]
    wanted = np.flatnonzero(counts >= 0)
    rows = torch.from_numpy(wanted).to(logits.device)
    chosen_ids = [batch.logprob_token_ids.get(slot) for slot in slots[wanted].tolist()]
    num_top = [
        0 if ids is not None else count
        for ids, count in zip(chosen_ids, counts[wanted].tolist(), strict=True)
    ]
    reports = token_logprobs(logits[rows], token_ids[rows], num_top)
    return {
        row: report if ids is None else with_tokens(report, logits[row], ids)
        for row, report, ids in zip(wanted.tolist(), reports, chosen_ids, strict=True)
    }
