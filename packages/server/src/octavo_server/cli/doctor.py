"""``octavo doctor``: what this machine is, where files are kept, and what is not yet compiled."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_core.host_memory import available_host_memory
from octavo_core.memory_planner import format_bytes
from octavo_server import __version__
from octavo_server.cache_dir import cache_dir

if TYPE_CHECKING:
    from octavo_worker.cpu_report import CPUReport

EXIT_PROBLEM = 1
LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "transformers", "tokenizers", "triton")
# The starter model, its tokenizer and the compiled kernels, with room to spare.
ENOUGH_DISK = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--warm",
        action="store_true",
        help="compile all CPU kernels ahead, so that no start has to; takes minutes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Look, compile what is asked for, and print.

    Returns:
        0, or 1 if something would keep a server from running well.
    """
    # Here, and not in the server's front, torch may be imported: it takes seconds.
    from octavo_worker.cpu_report import compile_all, report_cpu

    if args.warm:
        compile_all(_show_progress)
    facts = gather(report_cpu())
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
    else:
        print(describe(facts))
    return EXIT_PROBLEM if facts["problems"] else 0


def gather(cpu: CPUReport) -> dict[str, Any]:
    """Collect the facts, as ``--json`` prints them."""
    folder = cache_dir()
    facts = {
        "versions": {"octavo": __version__, "python": platform.python_version(), **_versions()},
        "system": platform.platform(),
        "cpu": msgspec.to_builtins(cpu),
        "cores": os.cpu_count(),
        "memory_available": available_host_memory(),
        "cache": {
            "folder": str(folder),
            "bytes": {part.name: _size(part) for part in sorted(_parts(folder))},
            "disk_free": shutil.disk_usage(_existing(folder)).free,
        },
    }
    return {**facts, "problems": find_problems(facts)}


def find_problems(facts: dict[str, Any]) -> list[str]:
    """Say what keeps a server from running well, and what to do about it."""
    problems = []
    cpu, cache = facts["cpu"], facts["cache"]
    if not cpu["is_writable"]:
        problems.append(
            f"{cpu['kernel_folder']} can't be written, so each start compiles the kernels again; "
            f"set OCTAVO_CACHE_DIR to a folder that can"
        )
    if not {"avx2", "neon"} & set(cpu["features"]):
        problems.append("the CPU has neither AVX2 nor NEON; its kernels will be slow")
    if cache["disk_free"] < ENOUGH_DISK:
        problems.append(
            f"only {format_bytes(cache['disk_free'])} of disk are free at {cache['folder']}; "
            f"make room, or set OCTAVO_CACHE_DIR to a folder elsewhere"
        )
    return problems


def describe(facts: dict[str, Any]) -> str:
    """Write the facts for a reader."""
    cpu, cache = facts["cpu"], facts["cache"]
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in cache["bytes"].items())
    lines = [
        ("versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())),
        ("system", facts["system"]),
        ("CPU", cpu["name"]),
        ("instructions", ", ".join(cpu["features"]) or "none that the kernels know"),
        ("threads", f"{cpu['num_threads']} of {facts['cores']} cores"),
        ("memory", f"{format_bytes(facts['memory_available'])} available"),
        ("cache", f"{cache['folder']} ({sizes or 'empty'})"),
        ("disk", f"{format_bytes(cache['disk_free'])} free there"),
        ("kernels", _kernel_line(cpu)),
    ]
    lines += [("PROBLEM", problem) for problem in facts["problems"]]
    return "\n".join(f"{name:13} {value}" for name, value in lines)


def _kernel_line(cpu: dict[str, Any]) -> str:
    line = f"{cpu['kernels_compiled']} of {cpu['kernels_total']} compiled"
    if cpu["missing"]:
        line += "; a start compiles what its model needs, octavo doctor --warm all of them"
    return line


def _show_progress(number: int, total: int) -> None:
    print(f"compiling kernels {number} of {total}", file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _parts(folder: Path) -> list[Path]:
    try:
        return [part for part in folder.iterdir() if part.is_dir()]
    except OSError:
        return []


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
