"""A server whose engine answers at once, so that all the work is the front's.

    python serve.py FOLDER SETTING=VALUE ...

The model has 256 bytes for tokens, and says ``a`` again and again. `FOLDER/pace` holds the
milliseconds from one step to the next, read when a request comes to an idle engine.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo_core import wire
from octavo_core.config import EngineConfig, resolve_config
from octavo_core.executor import ProgressCallback
from octavo_core.kv_events import KVEvent
from octavo_core.process import exit_with_parent
from octavo_server.engine_process import FrontLink, serve_engine
from octavo_server.front import run_front
from octavo_server.logging_setup import configure_logging

CONTEXT = 65536


def write_model(folder: Path) -> None:
    """Write a model folder without weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": len(alphabet),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


class InstantEngine:
    """Gives each request one token a step, and keeps to the pace.

    When a request ends, the times of its tokens (seconds, monotonic) are in a file that is
    called as the prompt.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._folder = Path(config.model_path)
        self._token_id = sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")
        self._left: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._times: dict[str, list[float]] = {}
        self._interval = 0.0
        self._due = 0.0

    def start(self, on_progress: ProgressCallback) -> wire.Ready:
        return wire.Ready(CONTEXT, 1 << 20, 16, 1 << 24, 256.0, "float32", "cpu")

    def add_request(self, request: wire.EngineCoreRequest) -> None:
        if not self._left:
            self._interval = float((self._folder / "pace").read_text()) / 1000
            self._due = time.monotonic()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        name = "".join(alphabet[token_id] for token_id in request.prompt_token_ids)
        self._left[request.request_id] = request.sampling_params.max_tokens or 1
        self._names[request.request_id] = name
        self._times[request.request_id] = []

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def check_health(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def take_kv_events(self) -> list[KVEvent]:
        return []

    def stats(self) -> wire.SchedulerStats:
        return wire.SchedulerStats(num_running=len(self._left))

    def shutdown(self) -> None:
        pass

    def step(self) -> wire.EngineCoreOutputs:
        wait = self._due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        now = time.monotonic()
        # Behind by more than a step, it does not try to catch up.
        self._due = max(self._due, now - self._interval) + self._interval
        outputs = []
        for request_id, left in list(self._left.items()):
            self._times[request_id].append(now)
            self._left[request_id] = left - 1
            reason = "length" if left == 1 else None
            outputs.append(wire.EngineCoreOutput(request_id, [self._token_id], reason))
            if left == 1:
                self._end(request_id)
        return wire.EngineCoreOutputs(outputs, self.stats())

    def _end(self, request_id: str) -> None:
        del self._left[request_id]
        times = self._times.pop(request_id)
        name = self._names.pop(request_id)
        (self._folder / f"{name}.times").write_bytes(struct.pack(f"{len(times)}d", *times))


def run_instant_engine(address: str, log_level: str) -> None:
    """Take the place of `octavo_server.engine_process.run_engine`."""
    exit_with_parent(Path(address.removeprefix("ipc://")).parent)
    configure_logging(log_level, "engine")
    sys.exit(serve_engine(FrontLink(address), InstantEngine, preload="json"))


def main() -> int:
    folder = Path(sys.argv[1])
    write_model(folder)
    settings = dict(pair.split("=", 1) for pair in sys.argv[2:])
    values = {"model": str(folder), "load_format": "dummy", "served_model_name": "a", **settings}
    return run_front(resolve_config({**values, "port": "0"}), run_instant_engine)


if __name__ == "__main__":
    sys.exit(main())
