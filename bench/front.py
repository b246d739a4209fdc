"""What the front costs: streams through HTTP, before an engine that answers at once.

    nox -s bench -- front
    nox -s bench -- front --streams 64 --paces 10 2 0.5 --route chat --fronts 2

An engine without a model gives each stream a token a step, one step every so many
milliseconds (`--paces`; 0 is as fast as it can). For each pace the table has

- what came: tokens a second over all streams, and how many of them an event had (more than 1
  where the front falls behind, and joins what waits);
- what it cost: CPU seconds of the front processes for 1,000 tokens, and what one front could do
  by that if it had a core to itself;
- how late it was: from the engine's step to the bytes in a client's hands.

Processor seconds say more than rates on a machine that does other things.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SERVER = Path(__file__).parent / "front_parts" / "instant_engine.py"
TEXT = re.compile(rb'"(?:text|content)":"(a+)"')
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Stream:
    """One client. `arrivals` has the time of each of its tokens, `num_events` their events."""

    name: str
    arrivals: list[float] = field(default_factory=list)
    num_events: int = 0


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, str(SERVER), folder, f"api_server_count={arguments.fronts}"]
        command += ["log_stats_interval=0", "max_num_queued_reqs=4096", "log_level=warning"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            host, port = url.removeprefix("http://").split(":")
            pids = front_processes(server.pid)
            print(f"{arguments.route}, {arguments.fronts} front(s)")
            print(
                f"{'streams':>7} {'pace ms':>8} {'tok/s':>8} {'tok/event':>9} {'CPU s/1k tok':>13}"
                f" {'tok/s a core':>12} {'late p50 ms':>12} {'p99 ms':>8}"
            )
            for num_streams in arguments.streams:
                for pace in arguments.paces:
                    (place / "pace").write_text(str(pace))
                    measure(arguments, place, (host, int(port)), pids, num_streams, pace)
        finally:
            server.terminate()
            server.wait()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], help="at a time")
    parser.add_argument("--paces", type=float, nargs="+", default=[20.0, 5.0, 0.0], help="of steps")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--route", choices=("completions", "chat"), default="chat")
    parser.add_argument("--fronts", type=int, default=1, help="front processes")
    return parser.parse_args()


def measure(
    arguments: argparse.Namespace,
    place: Path,
    address: tuple[str, int],
    pids: list[int],
    num_streams: int,
    pace: float,
) -> None:
    """Run one row of the table, and print it."""
    streams = [Stream(f"s{number:04d}") for number in range(num_streams)]
    asyncio.run(read_all(streams[:1], address, arguments.route, 20))  # a warm-up
    streams[0] = Stream("s0000")
    cpu, started = cpu_seconds(pids), time.monotonic()
    asyncio.run(read_all(streams, address, arguments.route, arguments.tokens))
    seconds, cpu = time.monotonic() - started, cpu_seconds(pids) - cpu
    tokens = sum(len(stream.arrivals) for stream in streams)
    events = sum(stream.num_events for stream in streams)
    late = sorted(delay for stream in streams for delay in delays(stream, place))
    print(
        f"{num_streams:7d} {pace:8.2f} {tokens / seconds:8.0f} {tokens / events:9.2f}"
        f" {1000 * cpu / tokens:13.3f} {tokens / max(cpu, 1e-9):12.0f}"
        f" {1000 * statistics.median(late):12.2f} {1000 * late[int(0.99 * len(late))]:8.2f}",
        flush=True,
    )


def delays(stream: Stream, place: Path) -> list[float]:
    """Return how late each token was."""
    data = (place / f"{stream.name}.times").read_bytes()
    sent = struct.unpack(f"{len(data) // 8}d", data)
    return [there - here for here, there in zip(sent, stream.arrivals, strict=True)]


async def read_all(
    streams: list[Stream], address: tuple[str, int], route: str, num_tokens: int
) -> None:
    await asyncio.gather(*(read(stream, address, route, num_tokens) for stream in streams))


async def read(stream: Stream, address: tuple[str, int], route: str, num_tokens: int) -> None:
    """Send one request, and take the time of each token. No client library: it would cost more."""
    body = {"max_tokens": num_tokens, "stream": True, "temperature": 0}
    if route == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": stream.name}]
    else:
        path, body["prompt"] = "/v1/completions", stream.name
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*address)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    rest = b""
    while b"[DONE]" not in rest:
        got = await reader.read(1 << 16)
        now = time.monotonic()
        if not got:
            raise RuntimeError(f"the server closed a stream: {rest[-300:]!r}")
        # An event may be cut where a packet ends.
        whole, _, rest = (rest + got).rpartition(b"\n\n")
        for text in TEXT.findall(whole):
            stream.num_events += 1
            stream.arrivals += [now] * len(text)
        rest = b"[DONE]" if b"[DONE]" in whole else rest
    writer.close()


def front_processes(pid: int) -> list[int]:
    """Return the server's processes, but for its engine."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == pid and title.startswith(b"octavo: front"):
                found.append(int(entry.name))
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time that processes have had."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


if __name__ == "__main__":
    sys.exit(main())
