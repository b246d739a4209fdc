"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads
from octavo_kernels.dispatch import use_cpu
from octavo_kernels.row_scratch import run_rows

penalize_rows = Kernel("adjust_logits.penalize_rows", "q")


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Make tokens that a row has seen less likely, in place.

    First the repetition penalty (Keskar et al. 2019, arXiv 1909.05858): logits of tokens of
    prompt and output are divided by it where positive, else multiplied. Then, as in OpenAI's
    API, the frequency penalty is subtracted once for each time that a token is in the output,
    and the presence penalty once if it is there at all.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        token_ids: ``[num_rows, max_tokens]`` int32, a row's prompt and then its output. Ids
            outside the vocabulary (placeholders of media) don't count.
        num_prompt_tokens: ``[num_rows]`` int64.
        num_tokens: ``[num_rows]`` int64, prompt and output; what lies beyond is not used.
        repetition: ``[num_rows]`` float32, above 0; 1 is off.
        frequency: ``[num_rows]`` float32; 0 is off.
        presence: ``[num_rows]`` float32; 0 is off.
    """
    if use_cpu(logits, token_ids) and logits.dtype == torch.float32 and logits.stride(-1) == 1:
        lengths = [x.to(torch.int64).contiguous() for x in (num_prompt_tokens, num_tokens)]
        penalties = [x.float().contiguous() for x in (repetition, frequency, presence)]
        tokens = token_ids.to(torch.int32).contiguous()
        num_rows, vocab_size = logits.shape
        counts = torch.zeros(get_num_threads(), vocab_size, dtype=torch.int32)
        words = torch.tensor(
            [
                *(logits.data_ptr(), 4 * logits.stride(0), num_rows, vocab_size),
                *(tokens.data_ptr(), 4 * tokens.stride(0)),
                *(x.data_ptr() for x in (*lengths, *penalties, counts)),
            ]
        )
        run_rows(penalize_rows, num_rows, words)
        return
    apply_penalties_reference(
        logits, token_ids, num_prompt_tokens, num_tokens, repetition, frequency, presence
    )


def apply_penalties_reference(
    logits: Tensor,
    token_ids: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Do the same in plain torch."""
    num_rows, vocab_size = logits.shape
    ids = token_ids.long()
    index = torch.arange(token_ids.shape[1], device=logits.device)
    known = (index < num_tokens.unsqueeze(1)) & (ids >= 0) & (ids < vocab_size)
    output = known & (index >= num_prompt_tokens.unsqueeze(1))
    # What doesn't count is added to one column more.
    counts = torch.zeros(2, num_rows, vocab_size + 1, dtype=torch.int32, device=logits.device)
    for count, counted in zip(counts, (known, output), strict=True):
        count.scatter_add_(1, ids.where(counted, vocab_size), counted.int())
    seen, in_output = counts[0, :, :-1] > 0, counts[1, :, :-1]
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalized = torch.where(seen, repeated, logits)
    penalized = penalized - frequency.unsqueeze(1) * in_output
    penalized = penalized - presence.unsqueeze(1) * (in_output > 0)
    logits.copy_(torch.where(seen, penalized, logits))
