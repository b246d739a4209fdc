"""A cost model from a device's data sheet: what nobody has measured yet.

A matrix product takes as long as reading its weights or as its arithmetic, whichever is
longer (Williams, Waterman and Patterson, "Roofline", 2009); attention reads K and V. No
device reaches its peaks, so both are taken at a share.
"""

from __future__ import annotations

from itertools import pairwise

from octavo_core.simulator.cost_model import CostModel
from octavo_core.simulator.model_work import ModelWork

# What engines reach of the peaks in long steady steps; a calibration replaces them.
BANDWIDTH_EFFICIENCY = 0.75
FLOPS_EFFICIENCY = 0.5
ATTENTION_FLOPS_EFFICIENCY = 0.3

# Host and launches. Measured engines lie between 1 and 4 ms a step without scheduling ahead.
STEP_OVERHEAD = 2e-3
ROW_OVERHEAD = 5e-6

# Bytes a second between device and host: what PCIe 4.0 × 16 reaches.
HOST_BANDWIDTH = 25e9

# One sum of a small tensor over the GPUs of a node.
EXCHANGE_SECONDS = 1e-5


def roofline_cost_model(
    work: ModelWork,
    bandwidth: float,
    flops: float,
    source: str = "",
    block_bytes: int = 0,
) -> CostModel:
    """Estimate a cost model.

    Args:
        work: What the model asks for, on each device.
        bandwidth: Peak of the device's memory, bytes a second.
        flops: Peak of its dense arithmetic in the model's type, operations a second.
        source: What this is, for a person.
        block_bytes: Of one KV block, which may be swapped.
    """
    bandwidth *= BANDWIDTH_EFFICIENCY
    token_seconds = work.token_flops / (flops * FLOPS_EFFICIENCY)
    knots, slopes = _linear_seconds(work, bandwidth, token_seconds)
    always = work.weights_bytes - work.expert_bytes
    return CostModel(
        step_seconds=STEP_OVERHEAD + work.num_exchanges * EXCHANGE_SECONDS + always / bandwidth,
        token_knots=knots,
        token_seconds=slopes,
        row_seconds=ROW_OVERHEAD,
        sample_seconds=work.sample_flops / (flops * FLOPS_EFFICIENCY),
        context_seconds=work.kv_bytes_per_token / bandwidth,
        pair_seconds=work.pair_flops / (flops * ATTENTION_FLOPS_EFFICIENCY),
        swap_seconds=block_bytes / HOST_BANDWIDTH,
        source=source,
    )


def _linear_seconds(
    work: ModelWork, bandwidth: float, token_seconds: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return knots and slopes of the linear layers' seconds above reading the dense weights."""
    always = (work.weights_bytes - work.expert_bytes) / bandwidth

    def seconds(tokens: int) -> float:
        # The share of experts that at least one of the tokens chooses.
        chosen = 1 - (1 - work.expert_share) ** tokens
        reading = always + chosen * work.expert_bytes / bandwidth
        return max(reading, tokens * token_seconds) - always

    # From here on arithmetic decides.
    break_even = max(1, round(work.weights_bytes / bandwidth / token_seconds))
    knots = sorted({0, break_even} | ({1, 4, 16, 64, 256} if work.expert_bytes else set()))
    knots = [knot for knot in knots if knot <= break_even]
    slopes = [
        max(0.0, (seconds(high) - (seconds(low) if low else 0.0)) / (high - low))
        for low, high in pairwise(knots)
    ]
    return tuple(knots), (*slopes, token_seconds)
