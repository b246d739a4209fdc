"""Which experts a token goes to."""

from __future__ import annotations

import torch
from torch import Tensor

SCORINGS = ("softmax", "sigmoid")


def select_experts(
    router_logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    correction_bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` experts of each token; of equal ones, the first.

    Args:
        router_logits: ``[num_tokens, num_experts]``.
        top_k: Experts of a token.
        scoring: What makes scores of logits: ``softmax`` (Mixtral, Qwen), or ``sigmoid``
            (DeepSeek-V3, arXiv 2412.19437).
        renormalize: Whether a token's weights are brought to a sum of one.
        num_groups: Groups of experts of which only some are looked at.
        top_groups: How many; those with the best sum of their two best experts (with
            ``sigmoid``) or with the best expert (with ``softmax``).
        correction_bias: ``[num_experts]``, added to the scores for the choice, not for the
            weights.
        scale: Factor of the weights.

    Returns:
        Weights ``[num_tokens, top_k]`` float32 and experts ``[num_tokens, top_k]`` int32,
        the best first.

    Raises:
        ValueError: A number is out of its range, or the scoring is another.
    """
    num_experts = router_logits.shape[1]
    if scoring not in SCORINGS:
        raise ValueError(f"scoring is {scoring!r}; it must be one of {', '.join(SCORINGS)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it must be between 1 and {num_experts} experts")
    if num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"num_groups is {num_groups} and top_groups {top_groups}; groups must divide "
            f"{num_experts} experts, and top_groups be between 1 and num_groups"
        )
    logits = router_logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if num_groups > 1:
        grouped = choice.view(len(choice), num_groups, -1)
        best = min(2 if scoring == "sigmoid" else 1, grouped.shape[2])
        of_groups = grouped.topk(best, dim=-1).values.sum(-1)  # [num_tokens, num_groups]
        kept = _top(of_groups, top_groups)
        mask = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).view_as(choice)
    experts = _top(choice, top_k)
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, experts.int()


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest, the first of equal ones first: `topk` promises no order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
