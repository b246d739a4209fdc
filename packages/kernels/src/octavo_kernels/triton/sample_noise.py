"""Sampling noise inside of Triton kernels; `octavo_kernels.sample_noise` has the method."""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_SPLITMIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOWBIAS_1 = tl.constexpr(0x7FEB352D)
_LOWBIAS_2 = tl.constexpr(0x846CA68B)

# 2**-31, and the largest float32 below 1.
_UNIT = tl.constexpr(2.0**-31)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def noise_key(seed, position):
    """Return the two uint32 halves of a row's key, from its int64 seed and position."""
    mixed = _mix64(seed.to(tl.uint64, bitcast=True))
    key = _mix64(mixed + position.to(tl.uint64, bitcast=True) * _GOLDEN)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def noise_words(low, high, token):
    """Hash int32 token ids to uint32 words of 32 random bits."""
    return _mix32(_mix32(token.to(tl.uint32, bitcast=True) ^ low) ^ high)


@triton.jit
def gumbel(word):
    """Turn words into float32 noise of the standard Gumbel distribution."""
    uniform = ((word >> 1).to(tl.int32).to(tl.float32) + 0.5) * _UNIT
    return -tl.log(-_log1p(-tl.minimum(uniform, _BELOW_ONE)))


@triton.jit
def _log1p(x):
    """Return log(1 + x), exact near zero, where the largest noise comes from.

    The rounding error of ``1 + x`` is undone by a quotient (Goldberg 1991, theorem 4).
    """
    sum = 1.0 + x
    return tl.where(sum == 1.0, x, tl.log(sum) * (x / (sum - 1.0)))


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * _SPLITMIX_1
    x = (x ^ (x >> 27)) * _SPLITMIX_2
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * _LOWBIAS_1
    x = (x ^ (x >> 15)) * _LOWBIAS_2
    return x ^ (x >> 16)
