"""The process that tries out grammars before the engine gets them.

Some constraints take the library minutes and gigabytes, and nothing can stop it in the middle.
So each one is compiled here first, in a process with limits that can be killed. It knows no
model: with a vocabulary of bytes a grammar costs nearly the same, and the process is small.

    python -m octavo_server.grammar_check_process

Frames on stdin and stdout: four bytes of length, little-endian, and msgpack. The first one
written says that it is ready.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import BinaryIO

import msgspec
import setproctitle

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams

CPU_SECONDS = 2
MEMORY_BYTES = 512 * 1024 * 1024
_NICENESS = 10


class Verdict(msgspec.Struct, frozen=True):
    """What came of one constraint.

    Attributes:
        params: The constraint in the form that is quickest to compile; None if it is no good.
        error: What is wrong with it, for the client.
        is_of_today: It may be another one when the machine has more time.
    """

    params: StructuredOutputsParams | None = None
    error: str | None = None
    is_of_today: bool = False


def main() -> None:
    """Answer constraints with verdicts until stdin ends."""
    from octavo_server.grammar_vocabulary import byte_vocabulary
    from octavo_server.llguidance_backend import LLGuidanceBackend

    setproctitle.setproctitle("octavo: grammar check")
    os.nice(_NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    backend = LLGuidanceBackend(byte_vocabulary)
    backend.prepare()
    _limit_memory()
    write_frame(sink, b"")
    while (frame := read_frame(source)) is not None:
        _limit_cpu()
        params = msgspec.msgpack.decode(frame, type=StructuredOutputsParams)
        write_frame(sink, msgspec.msgpack.encode(_try_out(backend, params)))


def read_frame(source: BinaryIO) -> bytes | None:
    """Read one frame; None at the end."""
    head = source.read(4)
    if len(head) < 4:
        return None
    return source.read(int.from_bytes(head, "little"))


def write_frame(sink: BinaryIO, content: bytes) -> None:
    """Write one frame."""
    sink.write(frame_of(content))
    sink.flush()


def frame_of(content: bytes) -> bytes:
    """Return `content` as a frame."""
    return len(content).to_bytes(4, "little") + content


def _try_out(backend: object, params: StructuredOutputsParams) -> Verdict:
    from octavo_server.llguidance_backend import LLGuidanceBackend, prepared

    assert isinstance(backend, LLGuidanceBackend)
    try:
        params = prepared(params)
        backend.compile(params)
        return Verdict(params)
    except InvalidRequestError as error:
        return Verdict(error=error.message)
    except RecursionError:
        return Verdict(error=f"structured_outputs.{params.kind} is nested too deep.")
    except MemoryError:
        return Verdict(error=too_large())


def too_large() -> str:
    """Return what a client is told of a constraint that needs too much memory."""
    megabytes = MEMORY_BYTES // (1024 * 1024)
    return f"structured_outputs takes more than {megabytes} MiB to compile; make it simpler."


def too_slow() -> str:
    """Return what a client is told of a constraint that takes too long."""
    return f"structured_outputs takes more than {CPU_SECONDS} s to compile; make it simpler."


def too_slow_today() -> str:
    """Return what a client is told of a constraint that took long beside everything else."""
    return (
        "structured_outputs takes too long to compile on a server that is as busy as this one is; "
        "make it simpler, or try again later."
    )


def _limit_memory() -> None:
    """Let this process grow by `MEMORY_BYTES`; beyond that allocations fail, and it ends."""
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A core file of half a gigabyte helps nobody.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu() -> None:
    """Have the kernel end this process after `CPU_SECONDS` more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = usage.ru_utime + usage.ru_stime
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_SECONDS + 1, hard))


if __name__ == "__main__":
    main()
