"""From a text, or a pair of texts, to the one request that the engine gets for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo_core.errors import ContextLengthError, InvalidRequestError
from octavo_core.model_spec import ModelSpec
from octavo_core.pooler_spec import PoolerSpec
from octavo_core.pooling_params import PoolingParams, PoolingTask
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.input_processor import InputProcessor, check_text
from octavo_server.tokenizer import Tokenizer

# Cut texts are tokenized again, and may come out longer: a word's half is other tokens.
_MAX_CUTS = 8
# Nothing is sampled, so nothing is turned into text.
_NO_SAMPLING = SamplingParams(max_tokens=1, detokenize=False)


@dataclass(frozen=True)
class PoolingOptions:
    """What a caller may say about texts that are pooled.

    Attributes:
        task: What is made of them.
        dimensions: Keep this many numbers of embeddings.
        use_activation: As in `PoolingParams`.
        truncate_prompt_tokens: Keep this many tokens, special ones included; -1 keeps what the
            context holds; None refuses what is longer.
        truncation_side: Where tokens are dropped, ``right`` or ``left``.
        add_special_tokens: Add those that the model asks for to a text.
        priority: Lower runs earlier.
        cache_salt: Keeps KV blocks apart from others'.
        tenant: Whom a fair-share policy counts the request for.
    """

    task: PoolingTask = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None

    def replace(self, **changes: Any) -> PoolingOptions:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


class PoolingInputProcessor(InputProcessor):
    """Tokenizes and validates texts for a model that pools.

    Its methods may run in any thread.

    Args:
        tokenizer: The model's tokenizer.
        spec: The model's hyper-parameters.
        pooler: What it is made for.
        max_model_len: Most tokens of a text, as far as it is known before the engine is ready.
        scheduling_policy: Name of the engine's policy.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        pooler: PoolerSpec,
        max_model_len: int,
        scheduling_policy: str = "fcfs",
    ) -> None:
        super().__init__(tokenizer, spec, max_model_len, scheduling_policy)
        self.pooler = pooler
        self._hidden_size = spec.hidden_size
        self._tells_texts_apart = spec.type_vocab_size > 1

    @property
    def longest_text(self) -> int:
        """Most tokens of a text."""
        if self.pooler.is_encoder or self._kv_cache_tokens is None:
            return self._max_model_len
        return min(self._max_model_len, self._kv_cache_tokens)

    def check_options(self, options: PoolingOptions) -> None:
        """Refuse what the model can't do, whatever the text.

        Raises:
            InvalidRequestError: The message names the field, its value and its limit.
        """
        if options.task not in self.pooler.tasks:
            raise InvalidRequestError(
                f"task is {options.task!r}; this model takes "
                f"{' or '.join(map(repr, self.pooler.tasks))}.",
                field="task",
            )
        if options.dimensions is not None:
            self._check_dimensions(options.dimensions)
        limit = options.truncate_prompt_tokens
        if limit is not None and (limit < -1 or limit == 0 or limit > self.longest_text):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {limit}; it must be from 1 to {self.longest_text}, the "
                f"most tokens of a text, or -1 for that.",
                field="truncate_prompt_tokens",
            )
        self._check_priority(options.priority)
        for field in ("cache_salt", "tenant"):
            value = getattr(options, field)
            if value is not None:
                check_text("user" if field == "tenant" else field, value)

    def process_text(
        self, request_id: str, text: str | list[int], options: PoolingOptions, field: str = "input"
    ) -> EngineCoreRequest:
        """Make the engine's request for one text.

        Args:
            request_id: Of the engine's request.
            text: Text, or token ids which are taken as they are.
            options: Checked by `check_options`.
            field: What errors call the text.

        Raises:
            InvalidRequestError: The text is empty, or an id is none of the vocabulary's.
            ContextLengthError: It is too long.
        """
        if isinstance(text, str):
            token_ids = self._encode(text, options, field)
        else:
            token_ids = list(text)
            limit = self._limit(options)
            if limit is not None:
                is_left = options.truncation_side == "left"
                token_ids = token_ids[-limit:] if is_left else token_ids[:limit]
            self.check_token_ids(token_ids, field)
        return self._request(request_id, token_ids, 0, options, field)

    def process_pair(
        self,
        request_id: str,
        first: str,
        second: str,
        options: PoolingOptions,
        *,
        fields: tuple[str, str] = ("text_1", "text_2"),
    ) -> EngineCoreRequest:
        """Make the engine's request for a pair of texts that are scored together.

        A pair that is to be truncated loses tokens of its second text.

        Raises:
            InvalidRequestError: One of them is empty.
            ContextLengthError: They are too long.
        """
        for field, text in zip(fields, (first, second), strict=True):
            _check_not_empty(field, text)
            self.check_length(field, text, is_cut=options.truncate_prompt_tokens is not None)
        special = options.add_special_tokens

        def encode(text: str) -> tuple[list[int], int]:
            return self.tokenizer.encode_pair(first, text, special)

        token_ids, start = encode(second)
        limit = self._limit(options)
        if limit is not None and len(token_ids) > limit:
            others = len(token_ids) - self.num_tokens(second)
            token_ids, start = self._shorten(second, others, limit, "right", encode)
        second_segment = start if self._tells_texts_apart else 0
        return self._request(request_id, token_ids, second_segment, options, fields[1])

    def num_tokens(self, text: str) -> int:
        """Count a text's tokens, without special ones."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def cut(self, text: str, num_tokens: int, side: str = "right") -> str:
        """Return a text without the tokens that are more than `num_tokens`.

        Args:
            side: Where tokens are dropped, ``right`` or ``left``.
        """
        spans = self.tokenizer.spans(text)
        if len(spans) <= num_tokens:
            return text
        if side == "left":
            return text[spans[len(spans) - num_tokens][0] :]
        return text[: spans[num_tokens - 1][1]]

    def _encode(self, text: str, options: PoolingOptions, field: str) -> list[int]:
        _check_not_empty(field, text)
        self.check_length(field, text, is_cut=options.truncate_prompt_tokens is not None)
        special = options.add_special_tokens

        def encode(text: str) -> tuple[list[int], int]:
            return self.tokenizer.encode(text, special), 0

        token_ids, _ = encode(text)
        limit = self._limit(options)
        if limit is not None and len(token_ids) > limit:
            others = len(token_ids) - self.num_tokens(text)
            token_ids, _ = self._shorten(text, others, limit, options.truncation_side, encode)
        return token_ids

    def _shorten(
        self,
        text: str,
        num_others: int,
        limit: int,
        side: str,
        encode: Callable[[str], tuple[list[int], int]],
    ) -> tuple[list[int], int]:
        """Encode as much of a text as there is room for beside `num_others` tokens.

        Raises:
            InvalidRequestError: There is no room for any of it.
        """
        keep = limit - num_others
        for _ in range(_MAX_CUTS):
            if keep < 1:
                break
            token_ids, start = encode(self.cut(text, keep, side))
            if len(token_ids) <= limit:
                return token_ids, start
            keep -= len(token_ids) - limit
        raise InvalidRequestError(
            f"truncate_prompt_tokens leaves {limit} tokens, and {num_others} are taken by special "
            f"tokens and by what is not cut; allow more.",
            field="truncate_prompt_tokens",
        )

    def _limit(self, options: PoolingOptions) -> int | None:
        limit = options.truncate_prompt_tokens
        return self.longest_text if limit == -1 else limit

    def _request(
        self,
        request_id: str,
        token_ids: list[int],
        second_segment: int,
        options: PoolingOptions,
        field: str,
    ) -> EngineCoreRequest:
        if not token_ids:
            raise InvalidRequestError(
                f"{field} is empty; it needs at least one token.", field=field
            )
        if len(token_ids) > self.longest_text:
            knob = "--max-model-len" if self.longest_text == self._max_model_len else ""
            raise ContextLengthError(
                f"{field} has {len(token_ids)} tokens, but this model takes at most "
                f"{self.longest_text} ({knob or '--kv-cache-memory'}); shorten it, or send "
                f"truncate_prompt_tokens: -1.",
                field=field,
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=_NO_SAMPLING,
            arrival_time=time.time(),
            priority=options.priority,
            cache_salt=options.cache_salt,
            tenant=options.tenant if self._takes_tenant else None,
            pooling_params=PoolingParams(
                options.task,
                options.dimensions,
                options.use_activation,
                second_segment,
                self.pooler.needs_all_tokens(options.task),
            ),
        )

    def _check_dimensions(self, dimensions: int) -> None:
        pooler = self.pooler
        if pooler.is_classifier or not pooler.is_matryoshka:
            raise InvalidRequestError(
                f"dimensions is {dimensions}, but the model does not support matryoshka "
                f"representation: fewer numbers of its embeddings mean little; leave it out.",
                field="dimensions",
            )
        if pooler.dimensions and dimensions not in pooler.dimensions:
            raise InvalidRequestError(
                f"dimensions is {dimensions}; the model supports "
                f"{', '.join(map(str, pooler.dimensions))}.",
                field="dimensions",
            )
        if not 1 <= dimensions <= self._hidden_size:
            raise InvalidRequestError(
                f"dimensions is {dimensions}; it must be from 1 to {self._hidden_size}.",
                field="dimensions",
            )


def _check_not_empty(field: str, text: str) -> None:
    check_text(field, text)
    if not text:
        raise InvalidRequestError(f"{field} is empty; it needs a character.", field=field)
