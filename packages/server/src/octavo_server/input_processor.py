"""From a prompt to the requests that the engine gets.

Whatever could make the engine stumble is refused here, before anything is queued.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_core.errors import ContextLengthError, InvalidRequestError, ModelError
from octavo_core.model_spec import ModelSpec
from octavo_core.sampling_params import SEED_BITS, SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo_server.chat_template import ChatTemplate, ControlTokenGuard

logger = logging.getLogger(__name__)


# A text with so many characters for each token that it may have is looked at piece by piece;
# English has four. The longest tokens, of spaces or dashes, have 128.
_USUAL_CHARS_PER_TOKEN = 4
_MOST_CHARS_PER_TOKEN = 128
# Most tokens of a text that is counted, or cut to what fits.
_MAX_COUNTED_TOKENS = 1 << 18


class InputProcessor:
    """Tokenizes and validates prompts for one model.

    Its methods may run in any thread; tokenizing a long prompt takes a while.

    Args:
        tokenizer: The model's tokenizer.
        spec: The model's hyper-parameters.
        max_model_len: Most tokens of prompt and answer, as far as it is known before
            the engine is ready.
        scheduling_policy: Name of the engine's policy, which says what a request's priority
            and tenant are good for.
        control_tokens_in_messages: What spells a control token in a message is the token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        max_model_len: int,
        scheduling_policy: str = "fcfs",
        *,
        control_tokens_in_messages: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._control_tokens_in_messages = control_tokens_in_messages
        self._vocab_size = spec.vocab_size
        self._max_model_len = max_model_len
        self._kv_cache_tokens: int | None = None
        # Policies of other packages may use both.
        self._takes_priority = scheduling_policy not in ("fcfs", "fair_share")
        self._takes_tenant = scheduling_policy not in ("fcfs", "priority")
        self._scheduling_policy = scheduling_policy
        _warn_of_tokens_beyond(tokenizer, spec.vocab_size)
        ids = dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_token_ids))
        self._eos_token_ids = tuple(i for i in ids if 0 <= i < spec.vocab_size)

    def set_limits(self, max_model_len: int, kv_cache_tokens: int) -> None:
        """Set the limits that the engine found at start-up.

        Args:
            max_model_len: Most tokens of prompt and answer.
            kv_cache_tokens: Tokens that the whole KV cache holds.
        """
        self._max_model_len = max_model_len
        self._kv_cache_tokens = kv_cache_tokens

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        field: str = "prompt",
    ) -> list[EngineCoreRequest]:
        """Make the engine's requests for one prompt, one for each of ``params.n`` choices.

        Args:
            request_id: The caller's id; choice ``i`` becomes ``{request_id}-{i}``.
            prompt: Text, or token ids which are taken as they are.
            arrival_time: Seconds since the epoch; now, if None.
            priority: Lower runs earlier; only 0 where the policy does not look at it.
            tenant: Whom a fair-share policy counts the request for.
            add_special_tokens: Add BOS and EOS to a text where the model asks for them.
            truncate_prompt_tokens: Keep this many tokens of the prompt's end; -1 keeps what
                leaves room for the answer.
            field: What errors call the prompt.

        Raises:
            InvalidRequestError: A value can't be used; the message names it and its limit.
            ContextLengthError: The prompt leaves no room for an answer.
        """
        _check_texts(params, cache_salt, tenant)
        if isinstance(prompt, str):
            check_text(field, prompt)
            self.check_length(field, prompt, is_cut=truncate_prompt_tokens is not None)
            prompt_token_ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            prompt_token_ids = list(prompt)
        prompt_token_ids = self._truncate(prompt_token_ids, truncate_prompt_tokens, params)
        return self._make_requests(
            request_id,
            prompt_token_ids,
            field,
            params,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def process_chat(
        self,
        request_id: str,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        truncate_prompt_tokens: int | None = None,
        **template_options: Any,
    ) -> list[EngineCoreRequest]:
        """Make the engine's requests for a conversation.

        The template writes BOS itself if the model wants one, so none is added. Control
        tokens that are spelt out in messages are letters like any others.

        Args:
            messages: In the shape of OpenAI's API; content is a string or text parts.
            truncate_prompt_tokens: As in `process`.
            template_options: Further variables of the chat template.

        Raises:
            InvalidRequestError: As in `process`; or the model has no chat template, or
                the template refuses the messages.
            ContextLengthError: The conversation leaves no room for an answer.
        """
        _check_texts(params, cache_salt, tenant)
        template_options["add_generation_prompt"] = add_generation_prompt
        is_cut = truncate_prompt_tokens is not None
        prompt_token_ids = self._encode_chat(messages, tools, template_options, is_cut=is_cut)
        prompt_token_ids = self._truncate(prompt_token_ids, truncate_prompt_tokens, params)
        return self._make_requests(
            request_id,
            prompt_token_ids,
            "messages",
            params,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Raises:
            InvalidRequestError: As in `process_chat`.
        """
        template_options["add_generation_prompt"] = add_generation_prompt
        return self._encode_chat(messages, tools, template_options, is_cut=True)

    def encode_prompt(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            InvalidRequestError: It has half a character.
            ContextLengthError: It is far too long.
        """
        check_text("prompt", prompt)
        self.check_length("prompt", prompt, is_cut=True)
        return self.tokenizer.encode(prompt, add_special_tokens)

    def encode_beginning(self, text: str) -> list[int]:
        """Return the token ids of a text that an answer goes on from."""
        if self._control_tokens_in_messages:
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer.encode_plain(text)

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Return the text that the chat template makes of a conversation.

        Raises:
            InvalidRequestError: As in `process_chat`.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; it needs one at least.", field="messages")
        text = self._usable_chat_template().render(
            [_with_text_content(message) for message in messages], **options
        )
        check_text("messages", text)
        return text

    def chat_problem(self) -> str | None:
        """Return why the model can't take messages, or None if it can."""
        try:
            self._usable_chat_template()
        except InvalidRequestError as error:
            return error.message
        return None

    def _usable_chat_template(self) -> ChatTemplate:
        try:
            template = self._chat_template
        except ModelError as error:
            reason = error.message.rstrip(".")
        else:
            if template is not None:
                return template
            reason = "The model has no chat template"
        raise InvalidRequestError(
            f"{reason}, so it can't take messages: send the prompt as text to /v1/completions "
            f"or LLM.generate, or give the model one with --chat-template FILE.",
            field="messages",
        )

    def check_length(self, field: str, text: str, *, is_cut: bool) -> None:
        """Refuse a text that is far too long before all of it is tokenized.

        The library takes 300 bytes for a token: 16 MiB of text were 2 GiB, and minutes.

        Args:
            is_cut: Its tokens need not fit the context: they are only counted, or cut off.

        Raises:
            ContextLengthError: Its beginning alone has too many tokens, or it is so long that
                any text would.
        """
        limit = max(self._max_model_len, _MAX_COUNTED_TOKENS if is_cut else 0)
        is_too_long = len(text) > _MOST_CHARS_PER_TOKEN * limit
        size = _USUAL_CHARS_PER_TOKEN * limit
        while size < len(text) and not is_too_long:
            # Where a word is cut, there may be some tokens that the whole text has not.
            num_tokens = len(self.tokenizer.encode(text[:size], add_special_tokens=False))
            is_too_long = num_tokens > limit + limit // 4
            size *= 4
        if is_too_long:
            raise ContextLengthError(
                f"{field} has {len(text)} characters, far more than {limit} tokens, and this "
                f"model's context is {self._max_model_len} tokens; shorten it or start the server "
                f"with a larger --max-model-len.",
                field=field,
            )

    def _encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        is_cut: bool,
    ) -> list[int]:
        (messages, tools), marker = self._guard.mark([messages, tools])
        text = self.render_chat(messages, tools=tools, **options)
        self.check_length("messages", text, is_cut=is_cut)
        if marker is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        token_ids: list[int] = []
        for piece, is_token in self._guard.split(text, marker):
            encode = self.tokenizer.encode if is_token else self.tokenizer.encode_plain
            token_ids += encode(piece, add_special_tokens=False)
        return token_ids

    @cached_property
    def _guard(self) -> ControlTokenGuard:
        from octavo_server.chat_template import ControlTokenGuard

        if self._control_tokens_in_messages:
            return ControlTokenGuard((), ())
        return ControlTokenGuard(self.tokenizer.special_tokens, self.tokenizer.added_tokens)

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        if self.tokenizer.chat_template is None:
            return None
        # jinja2 takes 0.1 s to import; a server may never see a chat.
        from octavo_server.chat_template import ChatTemplate

        return ChatTemplate(
            self.tokenizer.chat_template, self.tokenizer.bos_token, self.tokenizer.eos_token
        )

    def _make_requests(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        field: str,
        params: SamplingParams,
        *,
        arrival_time: float | None,
        priority: int,
        cache_salt: str | None,
        tenant: str | None,
    ) -> list[EngineCoreRequest]:
        self._check_priority(priority)
        if not prompt_token_ids:
            raise InvalidRequestError(
                f"{field} is empty; it needs at least one token.", field=field
            )
        self.check_token_ids(prompt_token_ids, field)
        self._check_vocabulary(params)
        params = self._complete(params, self._room(len(prompt_token_ids), field))
        return [
            EngineCoreRequest(
                request_id=f"{request_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampling_params=_for_choice(params, index),
                arrival_time=time.time() if arrival_time is None else arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant if self._takes_tenant else None,
            )
            for index in range(params.n)
        ]

    def _truncate(
        self, token_ids: list[int], limit: int | None, params: SamplingParams
    ) -> list[int]:
        if limit is None:
            return token_ids
        if limit == -1:
            room = min(self._max_model_len, self._kv_cache_tokens or self._max_model_len)
            limit = max(1, room - (params.max_tokens or 1))
        if limit < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {limit}; it must be at least 1, or -1 for what the "
                f"context leaves.",
                field="truncate_prompt_tokens",
            )
        return token_ids[-limit:]

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and not self._takes_priority:
            raise InvalidRequestError(
                f"priority is {priority}, but this server schedules by {self._scheduling_policy}, "
                f"which knows none; leave it out, or start the server with "
                f"--scheduling-policy priority.",
                field="priority",
            )

    def check_token_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Refuse what is no token of the model; `field` is for the message.

        Raises:
            InvalidRequestError: An id is none of the vocabulary's.
        """
        for position, token_id in enumerate(token_ids):
            # bool is an int to isinstance.
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"{field} has {token_id!r} at position {position}; token ids of this model's "
                    f"vocabulary are integers from 0 to {self._vocab_size - 1}.",
                    field=field,
                )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for field in (
            *("stop_token_ids", "logit_bias", "allowed_token_ids"),
            "logprob_token_ids",
        ):
            for token_id in getattr(params, field) or ():
                if not 0 <= token_id < self._vocab_size:
                    raise InvalidRequestError(
                        f"{field} has {token_id}; token ids of this model's vocabulary are 0 to "
                        f"{self._vocab_size - 1}.",
                        field=field,
                    )

    def _room(self, num_prompt_tokens: int, field: str) -> int:
        """Return how many tokens an answer may have; at least 1."""
        if num_prompt_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"{field} has {num_prompt_tokens} tokens, but this model's context is "
                f"{self._max_model_len} tokens and an answer needs at least one of them; shorten "
                f"the prompt or start the server with a larger --max-model-len.",
                field=field,
            )
        room = self._max_model_len - num_prompt_tokens
        if self._kv_cache_tokens is None:
            return room
        if num_prompt_tokens + 1 > self._kv_cache_tokens:
            raise ContextLengthError(
                f"{field} has {num_prompt_tokens} tokens, but the KV cache holds "
                f"{self._kv_cache_tokens} tokens, the answer's included; shorten the prompt or "
                f"start the server with a larger --kv-cache-memory.",
                field=field,
            )
        return min(room, self._kv_cache_tokens - num_prompt_tokens)

    def _complete(self, params: SamplingParams, room: int) -> SamplingParams:
        """Fill in what the engine has to know. A longer answer than there is room for is cut."""
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        params = msgspec.structs.replace(
            params,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=spell_bad_words(params.bad_words, self.tokenizer),
        )
        _check_choice_left(params)
        return params


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, each with and without a space before it.

    Vocabularies spell a word in two ways: at the start of a text, and after another one.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            spellings[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    spellings.pop((), None)
    return tuple(spellings)


def _check_choice_left(params: SamplingParams) -> None:
    """Refuse rules that forbid every token from the first one on."""
    if params.allowed_token_ids is None:
        return
    forbidden = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.min_tokens:
        forbidden |= {*params.eos_token_ids, *params.stop_token_ids}
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequestError(
            f"allowed_token_ids has {len(set(params.allowed_token_ids))} tokens, and bad_words or "
            f"min_tokens={params.min_tokens} forbid all of them; allow one more.",
            field="allowed_token_ids",
        )


def _for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Give each choice a seed of its own; choice 0 keeps the request's."""
    assert params.seed is not None
    seed = (params.seed + index + 2**SEED_BITS) % 2 ** (SEED_BITS + 1) - 2**SEED_BITS
    return msgspec.structs.replace(params, n=1, seed=seed)


def _with_text_content(message: dict[str, Any]) -> dict[str, Any]:
    """Make content one string, which every template takes."""
    content = message.get("content")
    if content is None:
        # A turn of tool calls alone. Templates would print what is undefined, or fail on it.
        return {**message, "content": ""}
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text") or not isinstance(text, str):
            raise InvalidRequestError(
                f"messages has a content part of type {kind!r}; this model takes text parts only.",
                field="messages",
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _warn_of_tokens_beyond(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Say so if the tokenizer knows tokens that the model has no embedding for."""
    highest = max([tokenizer.vocab_size - 1, *tokenizer.added_tokens.values()])
    if highest >= vocab_size:
        logger.warning(
            "The tokenizer has ids up to %d, and the model embeds 0 to %d: prompts that hold "
            "others are refused. The tokenizer may be another model's",
            highest,
            vocab_size - 1,
        )


def _check_texts(params: SamplingParams, cache_salt: str | None, tenant: str | None) -> None:
    for string in params.stop:
        check_text("stop", string)
    for word in params.bad_words:
        check_text("bad_words", word)
    if cache_salt is not None:
        check_text("cache_salt", cache_salt)
    if tenant is not None:
        check_text("user", tenant)


def check_text(field: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can spell but UTF-8 can't.

    Raises:
        InvalidRequestError: The text has one; `field` is for the message.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field} has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; send whole characters.",
            field=field,
        ) from None
