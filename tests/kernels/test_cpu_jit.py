"""The cache of compiled kernels, looked at from other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from octavo_kernels.cpu import jit

COUNT = """
import sys
import numpy as np
from octavo_kernels.cpu.jit import on_compile
from octavo_kernels.machine import count_chunks
compiled = []
on_compile(lambda name, seconds: compiled.append(name))
counts, ranks = np.zeros(41, np.int64), np.zeros(64, np.int64)
count_chunks(3, 40, counts.ctypes.data, ranks.ctypes.data)
assert (counts[:40] == 3).all(), counts
print(len(compiled) // 2, "numba" in sys.modules)
"""


@pytest.fixture(autouse=True)
def _declared_kernels(monkeypatch):
    """Kernels that a test declares are forgotten after it."""
    monkeypatch.setattr(jit, "KERNELS", dict(jit.KERNELS))


def _count(cache, **environment):
    environment = {**os.environ, "OCTAVO_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-c", COUNT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_finds_the_kernels_and_does_not_import_numba(tmp_path):
    # lead, follow and count_chunks; stop is for the end of the process
    assert _count(tmp_path) == ["3", "True"]
    assert _count(tmp_path) == ["0", "False"]
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "kernels").iterdir())
    assert names == ["probe.count_chunks", "team.follow", "team.lead", "team.stop"]
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0


def test_a_damaged_file_is_compiled_again(tmp_path):
    _count(tmp_path)
    for path in (tmp_path / "kernels").glob("probe*"):
        path.write_bytes(path.read_bytes()[:100])
    assert _count(tmp_path) == ["1", "True"]


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    assert _count(blocked) == ["3", "True"]


def test_the_name_of_a_file_follows_every_source_that_a_kernel_is_made_of(monkeypatch):
    kernel = jit.Kernel("probe.read_bytes", "qqq")
    before = jit._digest(kernel)
    assert {"probe", "simd", "team", "jit"} <= jit._sources("probe")
    source = jit._source
    monkeypatch.setattr(jit, "_source", lambda name: source(name) + "#" * (name == "simd"))
    assert jit._digest(kernel) != before


def test_a_declaration_that_does_not_match_is_refused():
    with pytest.raises(TypeError, match=r"probe.read_bytes takes 'qqq', not 'qd'"):
        jit._compile(jit.Kernel("probe.read_bytes", "qd"))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_nothing_is_run_that_others_could_have_written(which, tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    kernel = jit.Kernel("probe.copy_bytes", "qqq")
    jit.warm([kernel.name])
    (file,) = tmp_path.iterdir()
    assert jit._kept(file)
    assert jit.cache_can_be_written()
    opened = tmp_path if which == "folder" else file
    opened.chmod(opened.stat().st_mode | 0o020)
    assert jit._kept(file) == b""
    assert jit.cache_can_be_written() is (which == "file")


def test_a_full_disk_leaves_no_rest_of_a_file(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit.os, "replace", fail)
    jit._keep(tmp_path / "kernel.o", b"code")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_in_the_folder_that_the_server_uses(monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "~/octavo")
    jit.cache_folder.cache_clear()
    try:
        assert jit.cache_folder() == Path.home() / "octavo" / "kernels"
    finally:
        jit.cache_folder.cache_clear()


def test_warming_compiles_what_is_missing_and_tells_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    kernel = jit.Kernel("probe.copy_bytes", "qqq")
    told = []
    jit.warm(["probe.copy_bytes"], lambda name, seconds: told.append((name, seconds)))
    assert [name for name, _ in told] == ["probe.copy_bytes"] * 2
    assert told[0][1] is None
    assert told[1][1] > 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".o"]
    assert kernel.address
    jit.Kernel("probe.copy_bytes", "qqq")
    jit.warm(["probe.copy_bytes"], lambda name, seconds: pytest.fail(f"{name} was there"))
