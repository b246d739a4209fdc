"""A cluster that an engine has started for itself, as there was none.

It runs in `nox -s ray`, before the tests that have a cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from support.scripted_engine import write_byte_model
from support.server import Server, command_line, is_running
from support.tiny_families import save_family

if not os.environ.get("OCTAVO_RAY_TESTS"):
    pytest.skip("runs in `nox -s ray`", allow_module_level=True)

pytestmark = pytest.mark.timeout(420)

GONE_WITHIN = 5.0
"""Seconds, as docs/reliability.md has it."""


def test_it_ends_with_its_front():
    # Its sockets lie below, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="o-", dir="/tmp"))
    model = folder / "model"
    write_byte_model(model)  # its tokenizer
    save_family("llama", model, vocab_size=300)
    flags = ("--device", "cpu", "--cpu-threads", "2", "--kv-cache-memory", "4MiB")
    flags += ("--max-model-len", "128", "--max-num-batched-tokens", "128")
    flags += ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2")
    environment = {"RAY_TMPDIR": str(folder / "ray")}
    server = Server(str(model), *flags, log=folder / "log", env=environment)
    pids = []
    try:
        server.wait_until_ready()
        assert "There is no Ray cluster; starting one" in server.log
        pids = server.processes
        names = " ".join(map(command_line, pids))
        assert names.count("ray::RayWorker") == 2
        assert "raylet" in names
        server.process.kill()
        started = time.monotonic()
        while left := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() - started < GONE_WITHIN, list(map(command_line, left))
            time.sleep(0.02)
        print(f"gone after {time.monotonic() - started:.2f} s")
    finally:
        for pid in filter(is_running, {*pids, server.process.pid}):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
        shutil.rmtree(folder, ignore_errors=True)
