"""An engine process without a model: the real loop, scheduler and wire, and a scripted executor.

Its "model" speaks bytes. The answer repeats the prompt, byte by byte, and ends with `EOS`
after ``max_tokens`` or where the prompt ends. Words in the prompt ask for misbehaviour:
``slow`` makes each step take 20 ms, ``break`` raises in the first step and ``crack`` in a
later one, ``die`` ends the process after a few tokens, and ``hang`` never ends a step, as if a
device did not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import setproctitle
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo_core.config import EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.errors import ModelError
from octavo_core.executor import ProgressCallback
from octavo_core.grammar_compiler import GrammarCompiler
from octavo_core.model_spec import read_model_spec
from octavo_core.process import exit_with_parent
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_core.wire import TokenLogprobs
from octavo_server.engine_process import Engine, FrontLink, serve_engine
from octavo_server.logging_setup import configure_logging

EOS = "<eos>"
NUM_TOKENS = 257
EXIT_CODE = 7
# Where the last message begins with "say:", the answer is the rest of it, since the model repeats
# its prompt. The comment is what parsers are found by.
SAY_TEMPLATE = (
    "{# <tool_call> </think> #}"
    "{% if messages[-1].content.startswith('say:') %}{{ messages[-1].content[4:] }}{% else %}"
    "{% if tools %}tools={{ tools | tojson }};{% endif %}"
    "{% for message in messages %}{{ message.role }}={{ message.reasoning_content }}"
    "{{ message.content }}{% for call in message.tool_calls %}{{ call.function.name }}("
    "{{ call.function.arguments.items() | list }}){% endfor %};{% endfor %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }};{% endif %}"
    "{% if add_generation_prompt %}a={% endif %}{% endif %}"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}={{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


def write_byte_model(folder: Path, *, chat_template: str = CHAT_TEMPLATE, **config: object) -> Path:
    """Write a model folder whose tokens are the 256 bytes and `EOS`; its weights are empty."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({letter: index for index, letter in enumerate(alphabet)}, [])
    )
    # Words are split as real models' are: the library remembers 10,000 of them in each thread, and
    # where each prompt is one, that is 1.2 KiB a prompt.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    backend.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": NUM_TOKENS,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "eos_token_id": 256,
            **config,
        },
        "tokenizer_config.json": {"eos_token": EOS, "chat_template": chat_template},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def run_scripted_engine(address: str, log_level: str) -> None:
    """Take the place of `octavo_server.engine_process.run_engine`."""
    exit_with_parent(Path(address.removeprefix("ipc://")).parent)
    setproctitle.setproctitle("octavo: engine")
    configure_logging(log_level, "engine")
    sys.exit(serve_engine(FrontLink(address), _build, preload="json"))


def run_reluctant_engine(address: str, log_level: str) -> None:
    """A scripted engine that takes a second to load its model."""
    exit_with_parent(Path(address.removeprefix("ipc://")).parent)
    setproctitle.setproctitle("octavo: engine")
    sys.exit(serve_engine(FrontLink(address), _build_reluctantly, preload="json"))


def run_slow_start(address: str, log_level: str) -> None:
    """An engine whose model takes a minute to load."""
    exit_with_parent()
    sys.exit(serve_engine(FrontLink(address), _SlowStart, preload="json"))


def run_broken_model(address: str, log_level: str) -> None:
    """An engine that can't load its model."""
    exit_with_parent()
    sys.exit(serve_engine(FrontLink(address), _refuse, preload="json"))


def run_dying_start(address: str, log_level: str) -> None:
    """An engine that ends without a word."""
    os._exit(EXIT_CODE)


def slow_download(
    model: str, revision: str | None, on_progress: ProgressCallback, **options: object
) -> None:
    """Take the place of `resolve_model` while it fetches a model in another process."""
    download = subprocess.Popen(["sleep", "60"])
    try:
        while download.poll() is None:
            on_progress("downloading", 0.5)
            time.sleep(0.05)
    finally:
        download.kill()
        download.wait()


def _build(config: EngineConfig) -> Engine:
    spec = read_model_spec(config.model_path)
    return EngineCore(config, spec, ScriptedExecutor(), GrammarCompiler(AnyText()))


def _build_reluctantly(config: EngineConfig) -> Engine:
    time.sleep(1.0)
    return _build(config)


def _refuse(config: EngineConfig) -> Engine:
    raise ModelError("tensor x has the wrong shape.", field="model")


class _SlowStart:
    def __init__(self, config: EngineConfig) -> None:
        pass

    def start(self, on_progress: ProgressCallback) -> None:
        on_progress("loading weights", 0.25)
        time.sleep(60)

    def shutdown(self) -> None:
        pass


class AnyText:
    """A constraint that allows everything: the script has its say, whatever was asked for.

    It is backend, grammar and matcher at once, as there is nothing to keep apart.
    """

    is_terminated = False

    def prepare(self) -> None:
        pass

    def compile(self, params: StructuredOutputsParams) -> AnyText:
        return self

    def new_matcher(self) -> AnyText:
        return self

    def bitmask(self) -> bytes:
        return b"\xff" * (4 * (-(-NUM_TOKENS // 32)))

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        pass

    def take_forced_tokens(self) -> list[int]:
        return []


class ScriptedExecutor:
    """Repeats each prompt."""

    device = "cpu"
    dtype = "float32"
    kv_cache_dtype = "float32"
    device_memory: int | None = None
    max_concurrent_steps = 1

    def __init__(self) -> None:
        self._prompts: dict[int, list[int]] = {}
        self._num_known: dict[int, int] = {}
        self._logprobs: dict[int, int | None] = {}
        self._prompt_logprobs: dict[int, int | None] = {}
        self._output: Future[ModelRunnerOutput] = Future()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        encode = dict(zip(_byte_letters(), range(256), strict=True))
        # Token id to the byte that it stands for.
        self._bytes = [encode[letter] for letter in alphabet] + [0]

    def load_model(self, on_progress: ProgressCallback) -> None:
        on_progress("loading weights", 1.0)

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        pass

    def warm_up(self, on_progress: ProgressCallback) -> None:
        pass

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._output = Future()
        try:
            self._output.set_result(self._run(scheduler_output))
        except RuntimeError as error:
            self._output.set_exception(error)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        return self._output

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for slot in step.freed_slots:
            self._prompts.pop(slot, None)
        for request in step.new_requests:
            self._prompts[request.slot] = request.token_ids[: request.num_prompt_tokens]
            self._num_known[request.slot] = len(request.token_ids)
            self._logprobs[request.slot] = request.sampling_params.num_logprobs
            self._prompt_logprobs[request.slot] = request.sampling_params.prompt_logprobs
        for slot in step.slots:
            self._misbehave(slot)
        sampled = []
        logprobs = {}
        reports = {}
        for row, slot in enumerate(step.slots):
            start = step.num_computed_tokens[row]
            end = start + step.num_scheduled_tokens[row]
            count = self._prompt_logprobs[slot]
            following = self._prompts[slot][start + 1 : end + 1]
            if following and count is not None:
                reports[row] = [_some_logprobs(token_id, count) for token_id in following]
            sampled.append(self._next(slot, end))
            if sampled[-1] >= 0 and self._logprobs[slot] is not None:
                logprobs[row] = _some_logprobs(sampled[-1], self._logprobs[slot] or 0)
        return ModelRunnerOutput(step.step_id, sampled, logprobs, reports)

    def _next(self, slot: int, end: int) -> int:
        if end < self._num_known[slot]:
            return -1
        prompt = self._prompts[slot]
        position = self._num_known[slot] - len(prompt)
        self._num_known[slot] += 1
        return prompt[position] if position < len(prompt) else 256

    def _text(self, slot: int) -> bytes:
        return bytes(self._bytes[token_id] for token_id in self._prompts[slot])

    def _misbehave(self, slot: int) -> None:
        prompt = self._text(slot)
        is_late = self._num_known[slot] - len(prompt) >= 3
        if b"slow" in prompt:
            time.sleep(0.02)
        if b"hang" in prompt and is_late:
            time.sleep(3600)
        if b"die" in prompt and is_late:
            os._exit(EXIT_CODE)
        if b"break" in prompt or (b"crack" in prompt and is_late):
            raise RuntimeError("the prompt asked for it")


def _some_logprobs(token_id: int, count: int) -> TokenLogprobs:
    tops = [(token_id + i) % 257 for i in range(count)]
    values = [-0.5 - i for i in range(count)]
    return TokenLogprobs([token_id, *tops], [-0.5, *values], 1)


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable Latin-1 is itself, the rest is numbered."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
