"""`LLM`: the engine inside your own process, for batches of prompts.

from octavo_server import LLM, SamplingParams

with LLM() as llm:
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from types import FrameType, TracebackType
from typing import Any

import msgspec

# tqdm ships no types.
from tqdm import tqdm  # type: ignore[import-untyped]

from octavo_core.config import resolve_config
from octavo_core.errors import ConfigError, InvalidRequestError
from octavo_core.memory_planner import longest_model_len
from octavo_core.model_spec import read_model_spec
from octavo_core.pooler_spec import read_pooler_spec
from octavo_core.pooling_params import PooledOutput
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreOutputs, EngineCoreRequest
from octavo_server.grammar_compilers import make_grammar_compiler
from octavo_server.input_processor import InputProcessor
from octavo_server.model_source import resolve_model
from octavo_server.output_processor import OutputProcessor
from octavo_server.pooling_input_processor import PoolingInputProcessor
from octavo_server.pooling_llm import PoolingMethods
from octavo_server.position_logprobs import to_prompt_positions
from octavo_server.prompts import Prompt, as_prompts
from octavo_server.request_output import OutputAccumulator, OutputDelta, RequestOutput
from octavo_server.sampling_defaults import read_sampling_defaults
from octavo_server.tokenizer import load_tokenizer, read_chat_template

Conversation = Sequence[dict[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(PoolingMethods):
    """A model, loaded and ready to answer.

    Args:
        model: Folder, .gguf file or hub id; empty means the starter model.
        settings: Any field of `octavo_core.config`, for example ``max_model_len=2048``.
            ``OCTAVO_*`` environment variables fill in what is not given.

    Attributes:
        tokenizer: The model's tokenizer.
        engine: The engine core, for a look at its scheduler.

    Raises:
        ConfigError: A setting is unknown or outside its limits.
        ModelError: The model can't be found, read or served.
    """

    def __init__(self, model: str = "", **settings: Any) -> None:
        # The engine imports torch, which importing this module must not.
        from octavo_core.engine_core import EngineCore
        from octavo_worker.executors import create_executor

        config = resolve_config(environ=os.environ, keywords={"model": model or None, **settings})
        if config.parallel.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size is {config.parallel.data_parallel_size} (from "
                f"{config.source_of('data_parallel_size')}), but LLM is one engine; use octavo "
                f"serve, or an LLM in each of several processes.",
                field="data_parallel_size",
            )
        resolved = resolve_model(
            config.model.model,
            config.model.revision,
            needs_weights=config.model.load_format != "dummy",
        )
        config = config.replace("the model's location", model_path=str(resolved.path))
        spec = read_model_spec(resolved.path)
        pooler = read_pooler_spec(config, spec)
        self.tokenizer = load_tokenizer(resolved.path)
        if config.server.chat_template is not None:
            self.tokenizer.chat_template = read_chat_template(config.server.chat_template)
        self._default_params = SamplingParams(**read_sampling_defaults(resolved.path))
        self._output_processor = OutputProcessor(self.tokenizer)
        length, policy = longest_model_len(spec, config), config.scheduler.scheduling_policy
        takes_control_tokens = config.server.control_tokens_in_messages
        self._input_processor = (
            InputProcessor(
                self.tokenizer,
                spec,
                length,
                policy,
                control_tokens_in_messages=takes_control_tokens,
            )
            if pooler is None
            else PoolingInputProcessor(self.tokenizer, spec, pooler, length, policy)
        )
        self._ids = count()
        self._lock = threading.Lock()
        self._grammars = make_grammar_compiler(resolved.path, spec, self.tokenizer)
        executor = create_executor(config, spec)
        self.engine = EngineCore(config, spec, executor, self._grammars, pooler)
        try:
            ready = self.engine.start(_no_progress)
        except BaseException:
            self.engine.shutdown()
            raise
        self._input_processor.set_limits(ready.max_model_len, ready.kv_cache_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts.

        All prompts are checked before the first of them runs.

        Args:
            prompts: One prompt or several; text, or token ids which are taken as they are.
            sampling_params: For all prompts, or one for each; None takes what the model's
                generation_config.json recommends.
            use_tqdm: Show a progress bar.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidRequestError: A prompt or parameter can't be used. Nothing has run.
            RequestFailedError: The engine failed on a prompt.
        """
        items = as_prompts(prompts)

        def prepare(item: Prompt, request_id: str, params: SamplingParams) -> _Job:
            requests = self._input_processor.process(request_id, item, params)
            return _Job(request_id, item if isinstance(item, str) else None, requests)

        return self._run(items, sampling_params, prepare, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV blocks, as after a change of the weights."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: One conversation or several, in the shape of OpenAI's API.
            sampling_params: As in `generate`.
            use_tqdm: Show a progress bar.
            template_options: ``add_generation_prompt``, ``tools`` and variables of the
                model's chat template.

        Returns:
            One output for each conversation; ``prompt`` is None.

        Raises:
            InvalidRequestError: A conversation or parameter can't be used. Nothing has run.
            RequestFailedError: The engine failed on a conversation.
        """
        conversations = _as_conversations(messages)

        def prepare(item: Conversation, request_id: str, params: SamplingParams) -> _Job:
            requests = self._input_processor.process_chat(
                request_id, item, params, **template_options
            )
            return _Job(request_id, None, requests)

        return self._run(conversations, sampling_params, prepare, use_tqdm)

    def shutdown(self) -> None:
        """End the engine and free its memory. Safe to call twice."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _run(
        self,
        items: Sequence[Any],
        sampling_params: Params,
        prepare: Callable[[Any, str, SamplingParams], _Job],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if isinstance(self._input_processor, PoolingInputProcessor):
            raise InvalidRequestError(
                "this model pools texts and generates none; use embed, encode, classify or score.",
                field="model",
            )
        all_params = self._params_for(items, sampling_params)
        jobs = [
            prepare(item, f"llm-{next(self._ids)}", params)
            for item, params in zip(items, all_params, strict=True)
        ]
        with self._lock:
            self._check_grammars(all_params)
            self._run_jobs(jobs, use_tqdm)
        return [self._result(job) for job in jobs]

    def _run_pooling(
        self, requests: Sequence[EngineCoreRequest], use_tqdm: bool
    ) -> list[PooledOutput]:
        jobs = [_Job(request.request_id, None, [request]) for request in requests]
        with self._lock:
            self._run_jobs(jobs, use_tqdm)
        pooled = [job.accumulator.pooled for job in jobs]
        return [output for output in pooled if output is not None]

    def _run_jobs(self, jobs: Sequence[_Job], use_tqdm: bool) -> None:
        try:
            self._add(jobs)
            self._step_until_done(jobs, use_tqdm)
        except BaseException:
            self._abort(jobs)
            raise

    def _result(self, job: _Job) -> RequestOutput:
        result = job.accumulator.result()
        num_top = job.requests[0].sampling_params.prompt_logprobs
        entries = result.outputs[0].prompt_logprobs
        if num_top is None or entries is None:
            return result
        positions = to_prompt_positions(self.tokenizer, entries, num_top)
        return msgspec.structs.replace(result, prompt_logprobs=positions)

    def _params_for(self, items: Sequence[Any], params: Params) -> Sequence[SamplingParams]:
        if isinstance(params, SamplingParams):
            return [params] * len(items)
        if params is None:
            return [self._default_params] * len(items)
        if not isinstance(params, list | tuple) or not all(
            isinstance(item, SamplingParams) for item in params
        ):
            raise InvalidRequestError(
                f"sampling_params is {params!r}; give a SamplingParams, or a list with one for "
                f"each prompt.",
                field="sampling_params",
            )
        if len(params) != len(items):
            raise InvalidRequestError(
                f"sampling_params has {len(params)} items for {len(items)} prompts; give one for "
                f"all, or one for each.",
                field="sampling_params",
            )
        return params

    def _check_grammars(self, all_params: Sequence[SamplingParams]) -> None:
        """Compile all constraints, so that a bad one is told before anything runs."""
        for params in all_params:
            if params.structured_outputs is not None:
                self._grammars.start(params.structured_outputs).result()

    def _add(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            for index, request in enumerate(job.requests):
                self._output_processor.add(request, job.request_id, index)
                self.engine.add_request(request)

    def _step_until_done(self, jobs: Sequence[_Job], use_tqdm: bool) -> None:
        by_id = {job.request_id: job for job in jobs}
        with _Progress(len(jobs), use_tqdm) as progress, _Interrupts() as interrupts:
            while by_id:
                assert self.engine.has_unfinished_requests(), "the engine lost a request"
                outputs = interrupts.hold(self.engine.step).outputs
                deltas, to_abort = self._output_processor.process(outputs)
                if to_abort:
                    self.engine.abort_requests(to_abort)
                for delta in deltas:
                    job = by_id[delta.request_id]
                    job.accumulator.add(delta)
                    progress.count(delta)
                    if job.accumulator.error is not None:
                        raise job.accumulator.error.to_exception()
                    if job.accumulator.finished:
                        del by_id[delta.request_id]
                        progress.advance()

    def _abort(self, jobs: Sequence[_Job]) -> None:
        """Drop all that is left of a batch, so that the next one starts clean."""
        ids = [request.request_id for job in jobs for request in job.requests]
        for engine_request_id in ids:
            self._output_processor.remove(engine_request_id)
        self.engine.abort_requests(ids)


class _Job:
    """One prompt of a batch."""

    def __init__(
        self, request_id: str, prompt: str | None, requests: list[EngineCoreRequest]
    ) -> None:
        self.request_id = request_id
        self.requests = requests
        self.accumulator = OutputAccumulator(
            request_id, prompt, requests[0].prompt_token_ids, len(requests)
        )


class _Progress:
    """A bar that counts finished prompts and shows the speed in tokens."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", disable=not enabled)
        self._start = time.monotonic()
        self._num_tokens = 0

    def count(self, delta: OutputDelta) -> None:
        self._num_tokens += len(delta.token_ids)

    def advance(self) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{self._num_tokens / seconds:.1f} tokens/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class _Interrupts:
    """Puts off a Ctrl-C until the end of a step, so that scheduler and worker agree.

    A second one comes through at once. The handler is set once for all steps: to set it and take
    it back takes 120 us.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._is_holding = False
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> _Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)

    def hold(self, step: Callable[[], EngineCoreOutputs]) -> EngineCoreOutputs:
        """Run a step; what came in the meantime comes after it."""
        self._is_holding = True
        try:
            return step()
        finally:
            self._is_holding = False
            if self._held is not None:
                self._release(*self._held)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding and self._held is None:
            self._held = number, frame
        else:
            self._release(number, frame)

    def _release(self, number: int, frame: FrameType | None) -> None:
        self._held = None
        assert self._handler is not None
        self._handler(number, frame)


def _as_conversations(messages: Any) -> list[Conversation]:
    if isinstance(messages, list | tuple):
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        if all(_is_conversation(conversation) for conversation in conversations):
            return conversations
    raise InvalidRequestError(
        "messages must be a list of messages such as "
        "{'role': 'user', 'content': 'Hello'}, or a list of such lists.",
        field="messages",
    )


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, dict) for item in value)


def _no_progress(stage: str, progress: float | None) -> None:
    pass
