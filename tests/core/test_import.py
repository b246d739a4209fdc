"""Importing the scheduling brain is cheap: it drags nothing along that it may not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each takes 5 to 50 ms to import, or is needed by a process and not by a library.
HEAVY = {
    "argparse",
    "asyncio",
    "ctypes",
    "email",
    "http",
    "importlib.metadata",
    "inspect",
    "json",
    "logging",
    "multiprocessing",
    "numpy",
    "pathlib",
    "random",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "tomllib",
    "torch",
    "unittest",
    "urllib",
    "zipfile",
    "zmq",
}


def loaded_by(statement: str) -> set[str]:
    """Modules that a statement loads, beyond those of the interpreter and of msgspec."""
    code = (
        "import sys, msgspec, msgspec.inspect; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*set(sys.modules) - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return set(result.stdout.split())


def test_the_package_itself_is_a_version() -> None:
    assert loaded_by("import octavo_core") == {"octavo_core"}


@pytest.mark.parametrize(
    "module", ["scheduler", "block_manager", "policies", "request", "wire", "config"]
)
def test_no_heavy_module_is_loaded(module: str) -> None:
    loaded = loaded_by(f"import octavo_core.{module}")
    assert f"octavo_core.{module}" in loaded
    assert not loaded & HEAVY


def test_that_test_can_fail() -> None:
    assert loaded_by("import octavo_core.scheduler, asyncio") & HEAVY
