"""Sampling noise as a pure function of seed, position and token id.

Counter-based in the sense of Salmon et al. 2011 ("Parallel random numbers: as easy as
1, 2, 3"): no state, so a token's noise is the same whatever runs beside its request. The
row's key comes from the 64-bit finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators", figure 16), and each token's word from two
rounds of a 32-bit finalizer of the same xor-shift-multiply form, "lowbias32"
(https://nullprogram.com/blog/2018/07/31/).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_LOWBIAS = (0x7FEB352D, 0x846CA68B)


def sample_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Draw noise from the standard Gumbel distribution.

    Adding it to log-probabilities and taking the largest samples from them (Gumbel 1954;
    Maddison et al. 2014, arXiv 1411.0030).

    Args:
        seeds: ``[num_rows]`` int64.
        positions: ``[num_rows]`` int64, index in its sequence of the token to be sampled.
        token_ids: ``[num_tokens]`` int32.

    Returns:
        ``[num_rows, num_tokens]`` float32, finite.
    """
    word = _words(seeds, positions, token_ids)
    # 31 bits as a float32 in (0, 1]: fine near zero, which is where large noise comes from.
    # The largest value would round to 1 and give minus infinity, so it is held below.
    uniform = ((word >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    exponential = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _words(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Hash to ``[num_rows, num_tokens]`` int32 words of 32 random bits."""
    key = _mix64(_mix64(seeds) + positions * _signed(_GOLDEN, 64)).unsqueeze(1)  # [num_rows, 1]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    return _mix32(_mix32(token_ids ^ low) ^ high)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _signed(_SPLITMIX[0], 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(_SPLITMIX[1], 64)
    return x ^ _shift_right(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 16, 32)) * _signed(_LOWBIAS[0], 32)
    x = (x ^ _shift_right(x, 15, 32)) * _signed(_LOWBIAS[1], 32)
    return x ^ _shift_right(x, 16, 32)


def _shift_right(x: Tensor, count: int, bits: int) -> Tensor:
    """Shift in zeros; torch's own shift of a signed number copies the sign."""
    return (x >> count) & ((1 << (bits - count)) - 1)


def _signed(constant: int, bits: int) -> int:
    """Write an unsigned constant as the signed one with the same bits."""
    return constant - (1 << bits) if constant >> (bits - 1) else constant
