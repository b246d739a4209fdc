"""Triton kernel that filters logits, adds noise and takes the largest, one program a row.

Nothing is sorted. What top-k and top-p keep is all above one threshold, and of the logits equal
to it the first ones; the threshold is found digit by digit in the 32 bits of a float32, which
is a search with a fixed number of passes over a row that lies in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.sample import SamplingMetadata
from octavo_kernels.triton.launch import next_power_of_2, on_device_of, with_dense_rows
from octavo_kernels.triton.sample_noise import gumbel, noise_key, noise_words

# Logits of a row at once: 8 for each of 256 threads. 16 spill 148 bytes on sm_90.
COLUMNS = 2048

# Bits of a float32 that one pass over a row decides. Two bits take three sums at a time, which
# is as long as reading the row takes; a third bit would take seven.
DIGIT_BITS = tl.constexpr(2)


def sample(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Sample one token for each row; see `octavo_kernels.sample`.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        metadata: One entry for each row.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    logits = with_dense_rows(logits)
    parameters = metadata.on_device
    if parameters is None:
        parameters = torch.from_numpy(metadata.packed()).to(logits.device, non_blocking=True)
    block = min(COLUMNS, max(16, next_power_of_2(vocab_size)))
    with on_device_of(logits):
        _sample[(num_rows,)](
            *(logits, parameters, token_ids, num_rows, vocab_size, logits.stride(0)),
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return token_ids


@triton.jit
def _sample(
    logits, parameters, token_ids, num_rows, vocab_size, logits_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * logits_stride
    temperature = _float_of(tl.load(parameters + row))
    top_p = _float_of(tl.load(parameters + num_rows + row))
    log_min_p = _float_of(tl.load(parameters + 2 * num_rows + row))
    top_k = tl.load(parameters + 3 * num_rows + row)
    seed = tl.load(parameters + 4 * num_rows + row)
    position = tl.load(parameters + 5 * num_rows + row)

    largest, token = _argmax(row_logits, vocab_size, BLOCK)
    if temperature > 0.0:
        largest = tl.div_rn(largest, temperature)
        # Kept is what lies above a threshold, and of what equals it the first `ties`.
        threshold = _ordered(largest + log_min_p)
        ties = vocab_size
        if (top_k > 0) & (top_k < vocab_size):
            kth = _threshold_of_count(row_logits, vocab_size, temperature, top_k, BLOCK)
            if kth >= threshold:
                above, _ = _above(row_logits, vocab_size, temperature, kth, largest, BLOCK)
                threshold = kth
                ties = (top_k - above).to(tl.int32)
        if top_p < 1.0:
            _, mass_above = _above(row_logits, vocab_size, temperature, threshold, largest, BLOCK)
            equal = _count_equal(row_logits, vocab_size, temperature, threshold, BLOCK)
            weight = tl.exp(_unordered(threshold) - largest)
            total = mass_above + tl.minimum(ties, equal).to(tl.float32) * weight
            wanted = top_p * total
            nucleus = _threshold_of_mass(
                row_logits, vocab_size, temperature, wanted, largest, BLOCK
            )
            # Rounding may ask for a little more than there is.
            if nucleus < threshold:
                nucleus = threshold
            _, mass_above = _above(row_logits, vocab_size, temperature, nucleus, largest, BLOCK)
            weight = tl.exp(_unordered(nucleus) - largest)
            # Of equal logits, one is kept while the mass before it is below `wanted`.
            needed = tl.ceil((wanted - mass_above) / tl.maximum(weight, 1e-30))
            needed = tl.minimum(tl.maximum(needed, 1.0), vocab_size.to(tl.float32)).to(tl.int32)
            ties = tl.where(nucleus > threshold, needed, tl.minimum(ties, needed))
            threshold = nucleus
        token = _noisiest(
            row_logits, vocab_size, temperature, threshold, ties, seed, position, token, BLOCK
        )
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _float_of(parameter):
    """Return the float32 whose bits an int64 holds."""
    return parameter.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(x):
    """Map float32 to uint32 in the same order; both zeros are one number."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _unordered(key):
    """Undo `_ordered`."""
    bits = tl.where((key >> 31) == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(row_logits, start, vocab_size, temperature, BLOCK: tl.constexpr):
    """Load a block of logits over the temperature; minus infinity beyond the vocabulary."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row_logits + at, mask=at < vocab_size, other=float("-inf"))
    return tl.div_rn(x, temperature)


@triton.jit
def _argmax(row_logits, vocab_size, BLOCK: tl.constexpr):
    """Return the largest logit of a row and its token, the first of equal ones."""
    best = tl.load(row_logits)
    token = vocab_size * 0
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + at, mask=at < vocab_size, other=float("-inf"))
        largest = tl.max(x, 0)
        if largest > best:
            best = largest
            token = start + tl.argmax(x, 0, tie_break_left=True)
    return best, token


@triton.jit
def _threshold_of_count(row_logits, vocab_size, temperature, count, BLOCK: tl.constexpr):
    """Return the largest key that at least `count` keys reach: that of the count-th logit."""
    key = tl.full([], 0, tl.uint32)
    for digit in range(32 // DIGIT_BITS):
        shift = 32 - DIGIT_BITS * (digit + 1)
        one = tl.full([], 1, tl.uint32) << shift.to(tl.uint32)
        first = tl.zeros([BLOCK], tl.int32)
        second = tl.zeros([BLOCK], tl.int32)
        third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            keys = _ordered(_load(row_logits, start, vocab_size, temperature, BLOCK))
            first += (keys >= key + one).to(tl.int32)
            second += (keys >= key + one * 2).to(tl.int32)
            third += (keys >= key + one * 3).to(tl.int32)
        reached = (tl.sum(first, 0) >= count).to(tl.uint32)
        reached += (tl.sum(second, 0) >= count).to(tl.uint32)
        reached += (tl.sum(third, 0) >= count).to(tl.uint32)
        key = key + one * reached
    return key


@triton.jit
def _threshold_of_mass(row_logits, vocab_size, temperature, wanted, largest, BLOCK: tl.constexpr):
    """Return the largest key such that keys from it on have the mass `wanted` together."""
    key = tl.full([], 0, tl.uint32)
    for digit in range(32 // DIGIT_BITS):
        shift = 32 - DIGIT_BITS * (digit + 1)
        one = tl.full([], 1, tl.uint32) << shift.to(tl.uint32)
        first = tl.zeros([BLOCK], tl.float32)
        second = tl.zeros([BLOCK], tl.float32)
        third = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x = _load(row_logits, start, vocab_size, temperature, BLOCK)
            keys = _ordered(x)
            mass = tl.exp(x - largest)
            first += tl.where(keys >= key + one, mass, 0.0)
            second += tl.where(keys >= key + one * 2, mass, 0.0)
            third += tl.where(keys >= key + one * 3, mass, 0.0)
        reached = (tl.sum(first, 0) >= wanted).to(tl.uint32)
        reached += (tl.sum(second, 0) >= wanted).to(tl.uint32)
        reached += (tl.sum(third, 0) >= wanted).to(tl.uint32)
        key = key + one * reached
    return key


@triton.jit
def _above(row_logits, vocab_size, temperature, threshold, largest, BLOCK: tl.constexpr):
    """Return how many keys are above a threshold, and their mass relative to the largest."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = _load(row_logits, start, vocab_size, temperature, BLOCK)
        above = _ordered(x) > threshold
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(x - largest), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _count_equal(row_logits, vocab_size, temperature, threshold, BLOCK: tl.constexpr):
    """Return how many keys equal a threshold."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = _ordered(_load(row_logits, start, vocab_size, temperature, BLOCK))
        count += ((keys == threshold) & (at < vocab_size)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _noisiest(
    row_logits,
    vocab_size,
    temperature,
    threshold,
    ties,
    seed,
    position,
    token,
    BLOCK: tl.constexpr,
):
    """Return the kept token whose logit and noise add up to most; `token` if there is none."""
    low, high = noise_key(seed, position)
    best = temperature * 0.0 + float("-inf")
    ties_before = ties * 0
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _load(row_logits, start, vocab_size, temperature, BLOCK)
        keys = _ordered(x)
        equal = (keys == threshold).to(tl.int32)
        rank = ties_before + tl.cumsum(equal, 0) - equal
        kept = (keys > threshold) | ((equal == 1) & (rank < ties))
        ties_before += tl.sum(equal, 0)
        noisy = x + gumbel(noise_words(low, high, at))
        noisy = tl.where(kept & (at < vocab_size), noisy, float("-inf"))
        largest = tl.max(noisy, 0)
        if largest > best:
            best = largest
            token = start + tl.argmax(noisy, 0, tie_break_left=True)
    return token
