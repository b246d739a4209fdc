"""Weights on huge pages: the same numbers at the same addresses, and never an error."""

import mmap

import pytest
import torch

from octavo_kernels import use_huge_pages

HUGE_PAGE = 2 << 20


def _bytes_on_huge_pages(address):
    """AnonHugePages of the mapping that an address is in."""
    found = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                found = start <= address < end
            elif found and first == "AnonHugePages:":
                return int(line.split()[1]) << 10
    return 0


def test_what_is_moved_keeps_its_numbers_and_addresses():
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5 << 20, 1000, 7)]
    copies = [(tensor.clone(), tensor.data_ptr()) for tensor in tensors]
    moved = use_huge_pages(tensors)
    assert moved % HUGE_PAGE == 0
    for tensor, (copy, address) in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.data_ptr() == address
    if moved >= 5 << 20:
        # A whole page of the large one at least, whatever the system did with the edges.
        assert _bytes_on_huge_pages(tensors[0].data_ptr() + HUGE_PAGE) >= HUGE_PAGE


def test_what_can_not_be_moved_is_left_alone():
    assert use_huge_pages([]) == 0
    assert (
        use_huge_pages([torch.empty(0), torch.randn(4, 4).t(), torch.empty(9, device="meta")]) == 0
    )


def test_a_system_without_huge_pages_is_none_the_wiser(monkeypatch):
    if hasattr(mmap, "MADV_HUGEPAGE"):
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    tensor = torch.ones(3 << 20, dtype=torch.uint8)
    assert use_huge_pages([tensor]) == 0
    assert tensor.sum() == pytest.approx(3 << 20)
