"""Blocks copied within a cache and between two."""

import pytest
import torch

from octavo_kernels import copy_blocks, swap_blocks
from octavo_kernels.copy_blocks import consecutive_runs, swap_blocks_reference

PAIRS = torch.tensor([[3, 0], [4, 1], [1, 4], [0, 2]])


@pytest.mark.parametrize("swap", [swap_blocks, swap_blocks_reference], ids=["kernel", "twin"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (3, 8, 16)),
        (torch.bfloat16, (1, 4, 6)),
        (torch.int8, (1, 3, 5)),
        (torch.float8_e4m3fn, (3,)),
        (torch.float32, (3, 16, 256)),
    ],
    ids=str,
)
def test_blocks_are_copied_and_nothing_else_changes(swap, dtype, shape):
    source = (torch.randn(5, *shape) * 20).to(dtype)
    destination = (torch.randn(7, *shape) * 20).to(dtype)
    expected = destination.clone()
    for from_block, to_block in PAIRS.tolist():
        expected[to_block] = source[from_block]
    swap(source, destination, PAIRS)
    assert torch.equal(destination.view(torch.uint8), expected.view(torch.uint8))


def test_copies_within_each_cache():
    caches = [torch.randn(6, 2, 8, 8), torch.randn(6, 2, 8)]
    before = [cache.clone() for cache in caches]
    copy_blocks(caches, torch.tensor([[0, 3], [1, 4], [0, 5]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 2, 0, 1, 0]])
    copy_blocks(caches, torch.empty(0, 2, dtype=torch.int64))


def test_consecutive_pairs_are_one_run():
    pairs = torch.tensor([[3, 7], [4, 8], [5, 9], [6, 11], [7, 10], [8, 11]])
    assert consecutive_runs(pairs) == [(3, 7, 3), (6, 11, 1), (7, 10, 2)]


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([[0, 7]], "destination has blocks 0 to 6, not 7 to 7"),
        ([[5, 0]], "source has blocks 0 to 4"),
        ([[-1, 0]], "source has blocks 0 to 4, not -1"),
        ([[0, 1, 2]], "num_pairs, 2"),
    ],
)
def test_blocks_that_are_not_there_are_refused(pairs, text):
    with pytest.raises(ValueError, match=text):
        swap_blocks(torch.zeros(5, 2), torch.zeros(7, 2), torch.tensor(pairs))
    with pytest.raises(ValueError, match="can't be copied"):
        swap_blocks(torch.zeros(5, 2), torch.zeros(7, 3), torch.tensor([[0, 0]]))
