"""Promise: there is one door from outside, and those between the processes are nobody else's.

One TCP listener, on the loopback by default; all other sockets are files in a folder that only
this user enters. Who gets through the door is in `tests/server/test_api_auth.py`.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from support.faults import Figures, Target, run_as_command
from support.server import children_of

LISTEN = "0A"


async def check(target: Target) -> Figures:
    """Look through the sockets of all processes of a server."""
    pids = [target.pid, *children_of(target.pid)]
    doors = [door for pid in pids for door in listeners_of(pid)]
    assert len(doors) == 1, doors
    assert doors[0].startswith("0100007F:"), "it is the loopback's"
    return {"processes": len(pids), "TCP listeners": len(doors)}


def listeners_of(pid: int) -> list[str]:
    """Addresses that a process listens on, in the kernel's notation."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # One may be closed while we look.
        if entry.is_symlink() and (name := os.readlink(entry)).startswith("socket:["):
            inodes.add(name[len("socket:[") : -1])
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == LISTEN and fields[9] in inodes]


async def test_one_door(start_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="o-", dir="/tmp") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        front = start_front("constrained_engine").wait_ready()
        # So that the process is there that tries out grammars.
        body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "[a-z]+"}}
        assert front.post("/v1/completions", body).status_code == 200
        await check(Target(front.url, front.process.pid))
        folders = [path for path in Path(temporary).iterdir() if path.is_dir()]
        assert folders
        assert all(folder.stat().st_mode & 0o077 == 0 for folder in folders)
        assert not [path for path in Path(temporary).iterdir() if path.is_socket()]
        front.stop()


async def test_a_control_with_a_second_door_is_noticed(shared_target: Target) -> None:
    before = listeners_of(os.getpid())
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listeners_of(os.getpid())) == len(before) + 1
    await check(shared_target)


if __name__ == "__main__":
    run_as_command(check)
