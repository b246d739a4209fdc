"""Compiling ahead, in a folder of its own and in processes of their own."""

import os
import subprocess
import sys

import torch

from octavo_kernels import WEIGHT_KINDS, serving_kernels

PROGRAM = """
import logging
logging.basicConfig()
import octavo_kernels.machine
from octavo_kernels import compile_kernels
from octavo_kernels.cpu.jit import KERNELS
names = ["probe.read_bytes", "probe.copy_bytes", "probe.count_chunks", "team.stop"]
seen = []
count = compile_kernels([KERNELS[name] for name in names], lambda *at: seen.append(at))
assert all(KERNELS[name].is_compiled for name in names)
print(count, seen)
"""


def _run(folder):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "OCTAVO_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )


def test_compiled_once_and_found_by_the_next_process(tmp_path):
    first = _run(tmp_path)
    count, seen = first.stdout.split(" ", 1)
    assert count == "4"
    assert seen.startswith("[(1, 4)")
    files = sorted(path.name for path in (tmp_path / "kernels").iterdir())
    assert [name.rsplit("-", 1)[0] for name in files] == [
        "probe.copy_bytes",
        "probe.count_chunks",
        "probe.read_bytes",
        "team.stop",
    ]
    assert _run(tmp_path).stdout == "0 []\n"


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    run = _run(tmp_path / "file" / "cache")
    assert run.stdout.startswith("4 ")
    assert run.stderr.count("can't be kept") == 1
    assert "OCTAVO_CACHE_DIR" in run.stderr


def test_the_list_has_each_kind_and_type_that_is_asked_for():
    names = [kernel.name for kernel in serving_kernels(WEIGHT_KINDS, [torch.float16])]
    assert len(names) == len(set(names))
    assert {"decoder.decode", "attention.attend_f16", "quantized_matmul.multiply_q4_k"} <= set(
        names
    )
    assert "attention.attend_f32" not in names
