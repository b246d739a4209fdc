"""Penalties, single tokens and bitmasks against loops written out."""

import math

import pytest
import torch

from octavo_kernels import TokenEntries, apply_bitmask, apply_penalties, mask_logits
from octavo_kernels.apply_bitmask import apply_bitmask_reference
from octavo_kernels.apply_penalties import apply_penalties_reference

INF = math.inf
PENALTY_IMPLEMENTATIONS = [apply_penalties, apply_penalties_reference]
BITMASK_IMPLEMENTATIONS = [apply_bitmask, apply_bitmask_reference]


def _penalized(logit, in_prompt, in_output, repetition, frequency, presence):
    if in_prompt or in_output:
        logit = logit / repetition if logit > 0 else logit * repetition
    if in_output:
        logit = logit - frequency * in_output - presence
    return logit


@pytest.mark.parametrize("penalize", PENALTY_IMPLEMENTATIONS, ids=["kernel", "twin"])
def test_penalties(penalize):
    vocab_size, num_rows = 37, 5
    logits = torch.randn(num_rows, 2 * vocab_size)[:, :vocab_size]  # rows with gaps
    logits[0, 3] = -INF
    tokens = torch.randint(0, vocab_size, (num_rows, 30), dtype=torch.int32)
    tokens[1, 2], tokens[1, 5] = -1, vocab_size  # what no vocabulary has
    num_prompt, num_tokens = torch.tensor([0, 4, 9, 30, 12]), torch.tensor([0, 20, 9, 30, 25])
    repetition = torch.tensor([1.3, 1.2, 0.8, 1.5, 1.0])
    frequency = torch.tensor([0.5, 0.25, -0.5, 1.0, 0.0])
    presence = torch.tensor([0.1, -0.2, 0.3, 1.0, 0.0])
    before = logits.clone()
    expected = [
        _penalized(
            before[row, token].item(),
            token in tokens[row, : num_prompt[row]].tolist(),
            tokens[row, num_prompt[row] : num_tokens[row]].tolist().count(token),
            *(values[row].item() for values in (repetition, frequency, presence)),
        )
        for row in range(num_rows)
        for token in range(vocab_size)
    ]
    penalize(logits, tokens, num_prompt, num_tokens, repetition, frequency, presence)
    # One rounding of a quotient and two of differences of numbers below 8.
    torch.testing.assert_close(
        logits.flatten().double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(logits[4], before[4])  # all off
    assert torch.equal(logits[0], before[0])  # no token yet


def test_single_tokens_are_favoured_kept_and_forbidden():
    logits = torch.zeros(3, 6)
    mask_logits(
        logits,
        bias=(
            TokenEntries(torch.tensor([0, 0, 2, 1]), torch.tensor([1, 1, 5, 2])),
            torch.tensor([1.0, 0.5, -2.0, 3.0]),
        ),
        allowed=TokenEntries(torch.tensor([1, 1]), torch.tensor([2, 4])),
        forbidden=TokenEntries(torch.tensor([1, 0]), torch.tensor([4, 0])),
    )
    assert logits.tolist() == [
        [-INF, 1.5, 0, 0, 0, 0],
        [-INF, -INF, 3.0, -INF, -INF, -INF],
        [0, 0, 0, 0, 0, -2.0],
    ]


@pytest.mark.parametrize("mask", BITMASK_IMPLEMENTATIONS, ids=["kernel", "twin"])
@pytest.mark.parametrize(
    ("vocab_size", "num_words"), [(1, 1), (31, 1), (64, 2), (100, 4), (70, 2), (40, 1)]
)
def test_bitmask(mask, vocab_size, num_words):
    allowed = torch.rand(2, num_words * 32) < 0.5
    allowed[0, : min(16, vocab_size)] = True
    allowed[1, : min(9, vocab_size)] = False
    weights = 2 ** torch.arange(32, dtype=torch.int64)
    words = (allowed.view(2, num_words, 32) * weights).sum(-1).to(torch.int32)
    logits = torch.randn(4, vocab_size)
    before = logits.clone()
    mask(logits, words, torch.tensor([3, 1]))
    for row, bits in ((3, allowed[0]), (1, allowed[1])):
        for token in range(vocab_size):
            may = token < 32 * num_words and bool(bits[token])
            assert logits[row, token] == (before[row, token] if may else -INF)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_a_bitmask_of_another_shape_is_refused():
    logits, rows = torch.zeros(2, 40), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"int32 of \[2, num_words\]"):
        apply_bitmask(logits, torch.zeros(1, 2, dtype=torch.int32), rows)
    with pytest.raises(ValueError, match="int32"):
        apply_bitmask(logits, torch.zeros(2, 2, dtype=torch.int64), rows)
