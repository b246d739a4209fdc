import os

import pytest
import torch

from octavo_core.config import resolve_config
from octavo_worker import device
from octavo_worker.device import (
    available_cpu_memory,
    resolve_device,
    resolve_dtype,
    use_cpu_threads,
)


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "kind", "expected"),
    [
        ("auto", "bfloat16", "cpu", torch.float32),
        ("auto", None, "cpu", torch.float32),
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16),
        ("auto", "float32", "cuda", torch.bfloat16),
        ("auto", None, "cuda", torch.bfloat16),
        ("float32", "bfloat16", "cuda", torch.float32),
        ("float16", None, "cpu", torch.float16),
    ],
)
def test_types(wanted, checkpoint, kind, expected):
    assert resolve_dtype(wanted, checkpoint, torch.device(kind)) == expected


def test_devices():
    assert resolve_device(resolve_config({"device": "cpu"}), 0) == torch.device("cpu")
    expected = torch.device("cuda", 1) if torch.cuda.is_available() else torch.device("cpu")
    assert resolve_device(resolve_config({}), 1) == expected


def test_threads():
    assert use_cpu_threads(1) == torch.get_num_threads() == 1
    assert use_cpu_threads(None) == torch.get_num_threads() == len(os.sched_getaffinity(0))


def test_memory_is_within_the_containers_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    free = available_cpu_memory()
    assert free > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_cpu_memory() > 1000
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_cpu_memory() == 4000
    (tmp_path / "memory.current").write_text("6000\n")
    assert available_cpu_memory() == 0
