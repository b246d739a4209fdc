"""Sampling, penalties, masks and log-probabilities in Triton against the torch twins."""

import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from octavo_kernels import triton as kernels
from octavo_kernels.apply_bitmask import apply_bitmask_reference
from octavo_kernels.apply_penalties import apply_penalties_reference
from octavo_kernels.compute_logprobs import compute_logprobs_reference
from octavo_kernels.filter_logits import filter_logits
from octavo_kernels.sample import sample_reference
from octavo_kernels.sample_noise import _words, sample_noise
from octavo_kernels.triton.sample_noise import gumbel, noise_key, noise_words
from support.sampling import make_sampling_metadata

# The module; the package has the function under this name.
sampling = sys.modules["octavo_kernels.triton.sample"]


@triton.jit
def _noise(seeds, positions, tokens, words, noise, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    low, high = noise_key(tl.load(seeds), tl.load(positions))
    hashed = noise_words(low, high, tl.load(tokens + at))
    tl.store(words + at, hashed.to(tl.int32, bitcast=True))
    tl.store(noise + at, gumbel(hashed))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567890123456789])
@pytest.mark.parametrize("position", [0, 1, 2**40, 2**62])
def test_noise_has_the_bits_of_the_twin(seed, position):
    tokens = torch.cat([torch.arange(60), torch.tensor([2**31 - 1, 151_936, 49_151, 7])]).int()
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    words, noise = torch.empty(64, dtype=torch.int32), torch.empty(64)
    _noise[(1,)](seeds, positions, tokens, words, noise, BLOCK=64)
    assert torch.equal(words, _words(seeds, positions, tokens)[0])
    # Two logarithms, each right to some units of the last place.
    expected = sample_noise(seeds, positions, tokens)[0]
    torch.testing.assert_close(noise, expected, rtol=2e-6, atol=2e-6)


@triton.jit
def _gumbel(words, noise, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(noise + at, gumbel(tl.load(words + at).to(tl.uint32, bitcast=True)))


def test_noise_of_the_smallest_and_largest_words():
    words = torch.tensor([0, 1, 2, 3, 1000, 2**31 - 1, -(2**31), -2, -1, *range(7)]).int()
    noise = torch.empty(16)
    _gumbel[(1,)](words, noise, BLOCK=16)
    uniform = ((words.double() % 2**32).div(2, rounding_mode="floor") + 0.5) * 2.0**-31
    expected = -(-torch.log1p(-uniform.clamp(max=1 - 2**-24))).log()
    torch.testing.assert_close(noise.double(), expected, rtol=1e-6, atol=1e-6)


FILTERS = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "top-k 1": {"top_k": 1},
    "top-k": {"top_k": 7},
    "top-k of all": {"top_k": 1000},
    "top-p": {"top_p": 0.8},
    "top-p tiny": {"top_p": 1e-6},
    "top-p nearly one": {"top_p": 0.9999},
    "min-p": {"min_p": 0.05},
    "min-p one": {"min_p": 1.0},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    "hot": {"top_k": 50, "top_p": 0.95, "temperature": 5.0},
}


@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("values", FILTERS.values(), ids=FILTERS)
def test_samples_what_the_twin_samples(values, block, monkeypatch):
    monkeypatch.setattr(sampling, "COLUMNS", block)
    num_rows, vocab_size = 2, 101
    logits = 2 * torch.randn(num_rows, vocab_size + 5)[:, :vocab_size]
    metadata = make_sampling_metadata(
        num_rows, **values, seeds=range(num_rows), positions=[5, 2**40]
    )
    expected = sample_reference(logits, metadata)
    assert torch.equal(kernels.sample(logits, metadata), expected)
    # The same with parameters that are there, whatever the host's say.
    on_device = torch.from_numpy(metadata.packed())
    elsewhere = replace(make_sampling_metadata(num_rows, temperature=9.0), on_device=on_device)
    assert torch.equal(kernels.sample(logits, elsewhere), expected)


@pytest.mark.parametrize("values", FILTERS.values(), ids=FILTERS)
def test_keeps_what_the_twin_keeps_of_equal_logits(values, monkeypatch):
    """Equal logits go by their ids, within a block of columns and over two."""
    monkeypatch.setattr(sampling, "COLUMNS", 16)
    if not values or not values.get("temperature", 1):
        pytest.skip("nothing is filtered")
    row = torch.tensor(
        [
            1.0,
            3.0,
            2.0,
            3.0,
            0.0,
            -0.0,
            2.0,
            2.0,
            -1.0,
            3.0,
            0.0,
            2.0,
            -5.0,
            3.0,
            3.0,
            2.0,
            0.0,
            2.0,
        ]
    )
    filtered = filter_logits(
        row / values.get("temperature", 1.0),
        top_k=values.get("top_k", 0),
        top_p=values.get("top_p", 1.0),
        min_p=values.get("min_p", 0.0),
    )
    kept = filtered.isfinite()
    metadata = make_sampling_metadata(4, **values, seeds=range(4))
    logits = row.expand(4, -1)
    token_ids = kernels.sample(logits, metadata)
    assert kept[token_ids].all()
    assert torch.equal(token_ids, sample_reference(logits, metadata))


def test_rows_with_parameters_of_their_own():
    logits = torch.randn(4, 100)
    logits[2, ::2] = -torch.inf
    logits[3, 1:] = -torch.inf
    metadata = make_sampling_metadata(
        4,
        temperature=[0, 1, 0.5, 1],
        top_k=[5, 0, 3, 9],
        top_p=[1, 0.5, 1, 0.3],
        seeds=[1, 2, 3, 4],
    )
    assert torch.equal(kernels.sample(logits, metadata), sample_reference(logits, metadata))


def test_no_rows_and_the_smallest_vocabulary():
    assert kernels.sample(torch.empty(0, 7), make_sampling_metadata(0)).shape == (0,)
    assert kernels.sample(torch.zeros(1, 1), make_sampling_metadata(1)).tolist() == [0]
    assert kernels.sample(torch.zeros(1, 9), make_sampling_metadata(1, temperature=0)).tolist() == [
        0
    ]


@pytest.mark.parametrize("vocab_size", [1, 31, 500])
def test_logprobs(vocab_size):
    logits = 3 * torch.randn(3, vocab_size + 1)[:, 1:]
    logits[0, vocab_size // 2] = -torch.inf if vocab_size > 1 else 0
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2])
    result = kernels.compute_logprobs(logits, token_ids, 5)
    expected = compute_logprobs_reference(logits, token_ids, 5)
    # A sum of 500 exponentials in another order.
    torch.testing.assert_close(result.sampled, expected.sampled, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(result.top, expected.top, rtol=1e-6, atol=2e-6)
    assert torch.equal(result.ranks, expected.ranks)
    assert torch.equal(result.top_token_ids, expected.top_token_ids)


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 1100])
@pytest.mark.parametrize("num_words", [1, 2, 40])
def test_bitmask(vocab_size, num_words):
    whole = torch.randn(4, vocab_size + 9)
    logits, expected = whole[:, 3 : 3 + vocab_size], whole.clone()[:, 3 : 3 + vocab_size]
    before = whole.clone()
    bitmask = torch.randint(-(2**31), 2**31 - 1, (2, num_words), dtype=torch.int32)
    rows = torch.tensor([3, 0])
    apply_bitmask_reference(expected, bitmask, rows)
    kernels.apply_bitmask(logits, bitmask, rows)
    assert torch.equal(logits, expected)
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 3 + vocab_size :], before[:, 3 + vocab_size :])
    kernels.apply_bitmask(logits, bitmask[:0], rows[:0])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab_size", [3, 1030])
def test_penalties(vocab_size):
    num_rows, max_tokens = 4, 1050
    logits = torch.randn(num_rows, vocab_size)
    token_ids = torch.randint(-2, vocab_size + 3, (num_rows, max_tokens), dtype=torch.int32)
    arguments = (
        token_ids,
        torch.tensor([3, 0, 1000, 7]),
        torch.tensor([1050, 0, 1040, 7]),
        torch.tensor([1.3, 2.0, 0.5, 1.0]),
        torch.tensor([0.1, 1.0, -0.5, 0.0]),
        torch.tensor([0.5, 1.0, -2.0, 0.0]),
    )
    expected = logits.clone()
    apply_penalties_reference(expected, *arguments)
    kernels.apply_penalties(logits, *arguments)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
