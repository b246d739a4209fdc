"""Run Triton's kernels on the CPU, in its interpreter, with guarded memory around every result."""

import os

# Read when a kernel is decorated, so before anything imports one.
os.environ["TRITON_INTERPRET"] = "1"

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = []
if find_spec("triton") is None:
    # `nox -s triton` brings triton along; torch's CPU build does not.
    collect_ignore_glob = ["test_*.py"]
else:
    from support.triton_interpreter import repair

    repair()

GUARD_BYTES = 4096
# As bfloat16, float16 and float32 this is a NaN, so a number that was never written shows.
FILL = 0xFF


@pytest.fixture(autouse=True)
def guarded_memory(monkeypatch):
    """Put a guard zone on both sides of what the kernels' launchers allocate.

    A store out of bounds corrupts memory in silence, in the interpreter as on a GPU.
    """
    allocations = []
    original = torch.empty

    def guarded_empty(*size, dtype=None, device=None, **options):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        kind = dtype or torch.get_default_dtype()
        num_bytes = torch.Size(shape).numel() * kind.itemsize
        memory = original(num_bytes + 2 * GUARD_BYTES, dtype=torch.uint8).fill_(FILL)
        allocations.append((memory, num_bytes))
        return memory[GUARD_BYTES : GUARD_BYTES + num_bytes].view(kind).view(tuple(shape))

    def guarded_empty_like(tensor, dtype=None, **options):
        return guarded_empty(tuple(tensor.shape), dtype=dtype or tensor.dtype)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    monkeypatch.setattr(torch, "empty_like", guarded_empty_like)
    yield
    for memory, num_bytes in allocations:
        assert (memory[:GUARD_BYTES] == FILL).all(), "a kernel wrote before its result"
        assert (memory[GUARD_BYTES + num_bytes :] == FILL).all(), "a kernel wrote past its result"
