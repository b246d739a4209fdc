"""Weights on huge pages: the same numbers, side by side, and never an error."""

import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from octavo_kernels import HUGE_PAGE, HugePageMemory, huge_page_memory, map_memory, populate_memory

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


def test_what_is_kept_has_the_same_numbers_in_memory_of_its_own():
    memory = HugePageMemory()
    sizes = [(3, 5), (1000,), (70 << 20,), (2, 0), (7,), (40 << 20,), (40 << 20,)]
    tensors = [torch.randint(0, 256, size, dtype=torch.uint8) for size in sizes]
    tensors.append(torch.randn(33, 9).t())
    kept = [memory.keep(tensor) for tensor in tensors]
    del memory  # it all stays
    for tensor, copy in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
    spans = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in kept if len(copy))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_small_ones_share_a_page():
    memory = HugePageMemory()
    first, second = (memory.keep(torch.ones(100)) for _ in range(2))
    assert second.data_ptr() - first.data_ptr() == 448  # 400 bytes, and up to a multiple of 64
    assert first.data_ptr() % HUGE_PAGE == 0


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not SETTING.exists(), reason="other systems count memory in other ways")
def test_little_memory_takes_no_huge_page():
    before = _resident_bytes()
    held = [map_memory(20_000).fill_(1) for _ in range(50)]
    assert _resident_bytes() - before < 20 * HUGE_PAGE
    assert all(tensor.sum() == 20_000 for tensor in held)


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="the system has none to give"
)
def test_its_pages_are_huge():
    kept = HugePageMemory().keep(torch.ones(20 * HUGE_PAGE, dtype=torch.uint8))
    # All but what the system could not find room for at once.
    assert _bytes_on_huge_pages(kept.data_ptr()) >= HUGE_PAGE


@pytest.mark.parametrize("name", ["MADV_HUGEPAGE", "MAP_PRIVATE"])
def test_a_system_without_huge_pages_is_none_the_wiser(monkeypatch, name):
    monkeypatch.delattr(mmap, name, raising=False)
    kept = HugePageMemory().keep(torch.ones(3 << 20, dtype=torch.uint8))
    assert kept.sum() == 3 << 20


def test_a_kernel_without_huge_pages_is_none_the_wiser(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # EINVAL
    memory = map_memory(3 << 20)
    assert memory.shape == (3 << 20,)
    assert not memory.any()
    memory[-1] = 1
    assert memory.sum() == 1


def test_nothing_takes_no_memory():
    assert map_memory(0).shape == (0,)


def test_what_is_populated_is_in_memory_and_keeps_its_contents():
    memory = map_memory(3 * HUGE_PAGE)
    memory[5] = 7
    before = _resident_bytes()
    try:
        populate_memory(memory.data_ptr(), len(memory))
    except OSError:
        pytest.skip("an old kernel, or another system")
    assert _resident_bytes() - before >= 2 * HUGE_PAGE
    assert memory[5] == 7
    assert memory.sum() == 7


@pytest.mark.parametrize(("name", "value"), [("_MADV_POPULATE_WRITE", 9999), ("_libc", None)])
def test_a_system_that_can_not_populate_says_so(monkeypatch, name, value):
    monkeypatch.setattr(huge_page_memory, name, value)
    memory = map_memory(HUGE_PAGE)
    with pytest.raises(OSError, match=r"[Ii]nvalid|[Ii]mplemented"):
        populate_memory(memory.data_ptr(), len(memory))


def test_what_is_not_mapped_can_not_be_populated():
    with pytest.raises(OSError, match=r"memory|argument|implemented"):
        populate_memory(1 << 46, HUGE_PAGE)
