"""The script for GPUs does what it can without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "gpu" / "check_gpu.py"


def _run(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_skips_without_a_gpu_and_says_so():
    done = _run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: torch")


def test_its_logic_runs_on_a_cpu(tmp_path):
    done = _run("--dry-run", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout
    for model in ("small model", "small mixture"):
        assert f"ok  {model}: 60 tokens equal on CPU, GPU and in graphs" in done.stdout
    assert "3 rows of 64 tokens, graph, share" in (tmp_path / "figures.json").read_text()


def test_what_there_is_no_time_for_is_said():
    done = _run("--dry-run", "--minutes", "0")
    assert done.returncode == 1
    for name in ("small model", "small mixture", "decode", "kernels"):
        assert f"BAD {name}: TimeoutError: there was no time left for it" in done.stdout
