"""What a request has produced: one step's share of it, and the whole.

An `OutputDelta` is what one step added to one choice; a stream sends it as it is.
`OutputAccumulator` is the only way from deltas to a whole answer, so that an
answer is the same whether it was streamed or not.
"""

from __future__ import annotations

import msgspec

from octavo_core.errors import OctavoError, RequestFailedError, error_named
from octavo_core.pooling_params import PooledOutput
from octavo_core.wire import TokenLogprobs


class PositionLogprob(msgspec.Struct, frozen=True):
    """One token that could stand at a position.

    Attributes:
        token: The token as text; bytes that are no character show as U+FFFD.
        token_bytes: The token's own bytes.
        logprob: Natural logarithm of its probability, before temperature and filters.
    """

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities at one position of an answer.

    Attributes:
        chosen: The token that was sampled.
        top: As many alternatives as were asked for, the likeliest first. The
            chosen token is among them only if it is that likely.
        rank: Rank of the chosen token, 1 is the likeliest.
    """

    chosen: PositionLogprob
    top: list[PositionLogprob]
    rank: int


class OutputError(msgspec.Struct, frozen=True):
    """Why a choice failed.

    Attributes:
        kind: Name of a class in `octavo_core.errors`.
        message: For a person to read.
    """

    kind: str
    message: str

    def to_exception(self) -> OctavoError:
        """Return the exception that this error stands for."""
        return error_named(self.kind, self.message, default=RequestFailedError)


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one choice.

    Attributes:
        request_id: The caller's request, not the engine's.
        index: Which of the request's ``n`` choices.
        text: New text; may be empty, for example in the middle of a character.
        token_ids: New tokens, a stop or end token included.
        logprobs: One entry for each of ``token_ids``, or None if not asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` in the last delta.
        stop_reason: The stop string or the id out of ``stop_token_ids`` that was met.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        scheduled_time: When the engine first ran the choice, in seconds since the epoch; 0 where
            the delta does not tell it.
        num_preemptions: How often the choice had to go back in line, where the delta tells it.
        error: Set together with finish_reason ``error``.
        prompt_logprobs: In the first delta, if asked for: one entry for each token of the
            prompt but the first, not spelt out yet.
        pooled: What a pooling request asked for, in its only delta.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: OutputError | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    scheduled_time: float = 0.0
    num_preemptions: int = 0
    pooled: PooledOutput | None = None


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice; the fields are those of `OutputDelta`, joined."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the choices that answer it, in the order of their index.

    Attributes:
        prompt: The prompt as text, or None if it came as token ids.
        prompt_logprobs: One entry for each token of the prompt, if `LLM` was asked for them.
            The first token follows nothing and has None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class OutputAccumulator:
    """Joins the deltas of one request into a `RequestOutput`.

    Args:
        prompt: The prompt as text, or None if it came as token ids.
        num_choices: The request's ``n``.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_choices: int = 1,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._choices = [_Choice() for _ in range(num_choices)]
        self._num_cached_tokens = 0

    @property
    def finished(self) -> bool:
        """True once every choice has got its last delta."""
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def error(self) -> OutputError | None:
        """Why the first of the failed choices failed, if any did."""
        return next((choice.error for choice in self._choices if choice.error), None)

    def add(self, delta: OutputDelta) -> None:
        """Append one delta of this request."""
        self._choices[delta.index].add(delta)
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)

    @property
    def pooled(self) -> PooledOutput | None:
        """What a pooling request has brought."""
        return self._choices[0].pooled

    def result(self) -> RequestOutput:
        """Return what has been added so far.

        Raises:
            OctavoError: A choice failed; the class is the one that the engine named.
        """
        if self.error is not None:
            raise self.error.to_exception()
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[choice.result(index) for index, choice in enumerate(self._choices)],
            num_cached_tokens=self._num_cached_tokens,
        )


class _Choice:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: OutputError | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.pooled: PooledOutput | None = None

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error
            self.pooled = delta.pooled

    def result(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self.texts),
            token_ids=list(self.token_ids),
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            prompt_logprobs=self.prompt_logprobs,
        )
