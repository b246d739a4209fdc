"""Noise, filters, sampling and log-probabilities."""

import math

import numpy as np
import pytest
import torch

from octavo_kernels import (
    compute_logprobs,
    filter_logits,
    sample,
    sample_noise,
)
from octavo_kernels.compute_logprobs import compute_logprobs_reference
from octavo_kernels.sample import sample_reference
from support.sampling import make_sampling_metadata

INF = math.inf


def _noise(seed, position, token_ids):
    return sample_noise(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor(token_ids, dtype=torch.int32)
    )[0]


# The hash, in Python's integers.


def _mix64(x):
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _mix32(x):
    mask = 2**32 - 1
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


def _reference_noise(seed, position, token_id):
    key = _mix64((_mix64(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
    word = _mix32(_mix32(token_id ^ (key % 2**32)) ^ (key >> 32))
    uniform = min(((word >> 1) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63)])
def test_noise_is_the_hash_that_the_docstring_names(seed):
    token_ids = [0, 1, 2, 31, 49151, 128255]
    for position in (0, 1, 8191):
        expected = [_reference_noise(seed, position, token_id) for token_id in token_ids]
        assert _noise(seed, position, token_ids).tolist() == pytest.approx(expected, rel=1e-5)


def test_noise_depends_on_seed_position_and_token_only():
    ids = list(range(1000))
    alone = _noise(5, 9, ids)
    assert torch.equal(alone[500:501], _noise(5, 9, [500]))
    assert not torch.equal(alone, _noise(6, 9, ids))
    assert not torch.equal(alone, _noise(5, 10, ids))


def test_noise_is_gumbel():
    noise = sample_noise(
        torch.arange(20) * 7919, torch.arange(20), torch.arange(20000, dtype=torch.int32)
    )
    assert noise.isfinite().all()
    values = noise.flatten().double().sort().values
    n = len(values)
    # Kolmogorov-Smirnov: 400,000 draws exceed 1.95 / sqrt(n) once in 1,000 times, and the
    # seeds are fixed.
    distance = (torch.arange(1, n + 1) / n - (-(-values).exp()).exp()).abs().max()
    assert distance < 1.95 / math.sqrt(n)
    # Neighbouring seeds, positions and tokens have nothing to do with each other.
    assert abs(torch.corrcoef(noise[:2])[0, 1]) < 4 / math.sqrt(20000)
    assert abs(torch.corrcoef(torch.stack((noise[0, 1:], noise[0, :-1])))[0, 1]) < 0.03


def test_sampled_frequencies_follow_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -INF, 0.5]])
    draws = 6000
    seeds = np.arange(draws)
    tokens = sample(
        logits.expand(draws, -1), make_sampling_metadata(draws, seeds=seeds, temperature=0.7)
    )
    counts = torch.bincount(tokens, minlength=6).double()
    expected = (logits[0] / 0.7).softmax(0).double() * draws
    assert counts[4] == 0
    kept = expected > 0
    chi_square = ((counts - expected)[kept].square() / expected[kept]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom, once in 1,000


def test_positions_of_one_seed_follow_the_probabilities_too():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    tokens = sample(
        logits.expand(4000, -1), make_sampling_metadata(4000, seeds=3, positions=np.arange(4000))
    )
    counts = torch.bincount(tokens, minlength=4).double()
    assert ((counts - 1000).square() / 1000).sum() < 16.3  # 3 degrees of freedom


def test_a_row_is_the_same_alone_and_in_a_crowd_bit_for_bit():
    num_rows = 13
    logits = torch.randn(num_rows, 5003) * 2
    values = {
        "temperature": np.resize([0.0, 1.0, 0.3, 1.7], num_rows),
        "top_k": np.resize([0, 40, 0], num_rows),
        "top_p": np.resize([1.0, 0.9, 0.5, 0.99, 1.0], num_rows),
        "min_p": np.resize([0.0, 0.0, 0.02], num_rows),
        "seeds": np.arange(num_rows) - 4,
        "positions": np.arange(num_rows) * 3,
    }
    crowd = sample(logits, make_sampling_metadata(num_rows, **values))
    order = torch.randperm(num_rows).numpy()
    shuffled = sample(
        logits[order],
        make_sampling_metadata(num_rows, **{name: v[order] for name, v in values.items()}),
    )
    assert torch.equal(shuffled, crowd[order])
    for row in range(num_rows):
        one = make_sampling_metadata(1, **{name: v[row : row + 1] for name, v in values.items()})
        assert sample(logits[row : row + 1], one).item() == crowd[row]


def test_greedy_is_the_argmax_and_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, make_sampling_metadata(2, temperature=0)).tolist() == [1, 0]
    assert sample(logits, make_sampling_metadata(2, temperature=2, top_k=1)).tolist() == [1, 0]


def _kept(logits, **filters):
    filtered = filter_logits(torch.tensor(logits), **filters)
    for token_id in filtered.isfinite().nonzero().flatten().tolist():
        assert filtered[token_id] == logits[token_id]
    return filtered.isfinite().nonzero().flatten().tolist()


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.05, 0.25, 0.2)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_p": 0.9499}, [0, 1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.49}, [1, 3, 4]),
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        # After top-k the three kept have 0.47, 0.29 and 0.24 of the mass.
        ({"top_k": 3, "top_p": 0.45}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
        # After min-p the same three are left for top-p.
        ({"min_p": 0.49, "top_p": 0.75}, [1, 3]),
        ({"min_p": 0.49, "top_k": 4, "top_p": 0.99}, [1, 3, 4]),
    ],
)
def test_filters_keep(filters, expected):
    assert _kept(LOGITS, **filters) == expected


def test_ties_at_the_edge_of_top_k_go_to_lower_ids():
    assert _kept([0.0, 1.0, 0.0, 0.0, 2.0], top_k=3) == [0, 1, 4]


def test_filters_with_minus_infinity_keep_something():
    logits = [-INF, 0.5, -INF, -INF]
    assert _kept(logits, top_k=2) == [1]
    assert _kept(logits, top_p=0.9999) == [1]
    assert _kept(logits, min_p=0.1, top_k=3, top_p=0.5) == [1]


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_the_quick_nucleus_equals_the_sorted_one(scale, top_p):
    """Flat logits have a nucleus beyond the candidates, peaked ones within."""
    logits = torch.randn(6000) * scale
    probabilities, ids = logits.double().softmax(0).sort(descending=True)
    count = int((probabilities.cumsum(0) - probabilities < top_p).sum())
    kept = filter_logits(logits, top_p=top_p).isfinite()
    # Sums in float32 may move the edge by a token of the flat distribution.
    assert abs(int(kept.sum()) - count) <= 1
    assert kept[ids[: count - 1]].all()


@pytest.mark.parametrize("num_top", [0, 1, 3, 9])
def test_logprobs_are_raw_and_ranked(num_top):
    logits = torch.tensor([[0.0, 2.0, 1.0, -INF, 1.0], [3.0, 0.0, 0.0, 0.0, 9.0]])
    found = compute_logprobs(logits, torch.tensor([2, 0]), num_top)
    expected = logits.double().softmax(-1).log()
    assert found.sampled.tolist() == pytest.approx(expected[[0, 1], [2, 0]].tolist(), rel=1e-6)
    assert found.ranks.tolist() == [2, 2]
    count = min(num_top, 5)
    assert found.top.shape == found.top_token_ids.shape == (2, count)
    if count:
        assert found.top_token_ids[:, 0].tolist() == [1, 4]
        torch.testing.assert_close(
            found.top.double(), expected.gather(-1, found.top_token_ids), rtol=1e-6, atol=1e-6
        )


# The kernels against their twins.


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 1003, 49152])
def test_kernel_and_twin_choose_the_same_tokens(vocab_size):
    """The edge of a nucleus and noise agree to some units in the last place: no draw of these
    lies so close to another."""
    num_rows = 24
    logits = torch.randn(num_rows, 2 * vocab_size)[:, :vocab_size]  # rows with gaps
    logits *= torch.logspace(-1, 1.5, num_rows).unsqueeze(1)
    metadata = make_sampling_metadata(
        num_rows,
        temperature=np.resize([0.0, 1.0, 0.3, 1.7], num_rows),
        top_k=np.resize([0, 40, 1000, 0, 3], num_rows),
        top_p=np.resize([1.0, 0.9, 0.5, 0.999, 1.0, 1e-6, 0.97], num_rows),
        min_p=np.resize([0.0, 0.0, 0.02], num_rows),
        seeds=np.arange(num_rows) * 2**59,
        positions=np.arange(num_rows) * 3,
    )
    assert torch.equal(sample(logits, metadata), sample_reference(logits, metadata))


@pytest.mark.parametrize(
    "filters", [{"top_k": 70}, {"top_p": 0.503}, {"top_k": 90, "top_p": 0.705}, {"min_p": 1.0}]
)
def test_many_equal_logits_are_kept_by_id(filters):
    """Every token that can be drawn is, and no other: 300 equal ones, of which some are kept."""
    logits = torch.full((1, 320), -INF)
    logits[0, 10:310] = 1.5
    kept = set(filter_logits(logits[0], **filters).isfinite().nonzero().flatten().tolist())
    draws = 40 * len(kept)
    tokens = sample(
        logits.expand(draws, -1), make_sampling_metadata(draws, seeds=np.arange(draws), **filters)
    )
    assert set(tokens.tolist()) == kept


def test_rows_with_one_token_left():
    logits = torch.full((2, 100), -INF)
    logits[0, 57] = -3.0
    tokens = sample(logits, make_sampling_metadata(2, top_k=5, top_p=0.9, min_p=0.1))
    assert tokens.tolist() == [57, 0]


@pytest.mark.parametrize("num_top", [0, 5, 20, 200])
def test_kernel_and_twin_give_the_same_logprobs(num_top):
    logits = torch.randn(9, 1003) * torch.logspace(-1, 1.5, 9).unsqueeze(1)
    logits[3, 5:] = -INF
    token_ids = torch.randint(0, 5, (9,))
    found = compute_logprobs(logits, token_ids, num_top)
    expected = compute_logprobs_reference(logits, token_ids, num_top)
    assert torch.equal(found.ranks, expected.ranks)
    # Sums of a thousand exponentials, and a logarithm, each to some units in the last place.
    torch.testing.assert_close(found.sampled, expected.sampled, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.top, expected.top, rtol=1e-6, atol=2e-6)
    finite = expected.top.isfinite()
    assert torch.equal(found.top_token_ids[finite], expected.top_token_ids[finite])


def test_equal_logprobs_are_listed_by_id():
    found = compute_logprobs(torch.zeros(1, 300), torch.tensor([299]), 4)
    assert found.top_token_ids.tolist() == [[0, 1, 2, 3]]
    assert found.ranks.tolist() == [1]
