"""From a prompt to the requests that the engine gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo_core.model_spec import ModelSpec
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.tokenizer import Tokenizer


class InputProcessor:
    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec, max_model_len: int) -> None:
        raise NotImplementedError

    def set_limits(self, max_model_len: int, kv_cache_tokens: int) -> None:
        raise NotImplementedError

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> list[EngineCoreRequest]:
        raise NotImplementedError

    def process_chat(
        self,
        request_id: str,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[EngineCoreRequest]:
        raise NotImplementedError
