"""From the engine's tokens to deltas of text."""

from __future__ import annotations

import logging

from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from octavo_server.detokenizer import Detokenizer
from octavo_server.position_logprobs import to_position
from octavo_server.request_output import OutputDelta, OutputError, PositionLogprobs
from octavo_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Follows every choice in flight and turns what a step did into deltas.

    Not thread-safe: all calls come from the thread that receives the engine's outputs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, _Choice] = {}

    def add(self, request: EngineCoreRequest, request_id: str, index: int) -> None:
        """Follow a choice; call it before the engine gets the request.

        Args:
            request: What the engine gets.
            request_id: The caller's request, which the deltas will carry.
            index: Which of the request's choices.
        """
        assert request.request_id not in self._choices
        self._choices[request.request_id] = _Choice(self._tokenizer, request, request_id, index)

    def remove(self, engine_request_id: str) -> None:
        """Forget a choice whose client has left. Unknown ids are ignored."""
        self._choices.pop(engine_request_id, None)

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[OutputDelta], list[str]]:
        """Turn one step's outputs into deltas.

        Outputs of choices that have ended or were removed are dropped: the engine may
        send a few more before it hears of an abort.

        Returns:
            The deltas, at most one a choice, and the engine's ids of requests that
            ended here because of a stop string and that the engine has to abort.
        """
        deltas: list[OutputDelta] = []
        to_abort: list[str] = []
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            try:
                delta = choice.process(output)
            except Exception:  # it is this choice's alone
                logger.exception("The output of request %s can't be processed", output.request_id)
                delta = choice.failure(output)
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._choices[output.request_id]
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
        return deltas, to_abort


class _Choice:
    """One choice in flight."""

    def __init__(
        self, tokenizer: Tokenizer, request: EngineCoreRequest, request_id: str, index: int
    ) -> None:
        params = request.sampling_params
        self._tokenizer = tokenizer
        self._params = params
        self._request_id = request_id
        self._index = index
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._detokenizer = _make_detokenizer(tokenizer, params) if params.detokenize else None

    def process(self, output: EngineCoreOutput) -> OutputDelta:
        if output.finish_reason == "error":
            return self._delta(output, "", 0)
        if self._detokenizer is None:
            return self._delta(output, "", len(output.new_token_ids))
        text, num_taken = self._detokenize(self._detokenizer, output)
        return self._delta(output, text, num_taken)

    def failure(self, output: EngineCoreOutput) -> OutputDelta:
        """Return the last delta of a choice whose output can't be shown."""
        return OutputDelta(
            request_id=self._request_id,
            index=self._index,
            text="",
            token_ids=[],
            finish_reason="error",
            num_prompt_tokens=self._num_prompt_tokens,
            error=OutputError(
                "RequestFailedError",
                f"Request {output.request_id} failed while its tokens were turned into text; the "
                f"server's log has more.",
            ),
        )

    def _detokenize(self, detokenizer: Detokenizer, output: EngineCoreOutput) -> tuple[str, int]:
        """Return the new text, and how many tokens there are up to a stop string."""
        token_ids = output.new_token_ids
        end_token = self._hidden_end_token(output)
        visible = token_ids if end_token is None else token_ids[:-1]
        texts = []
        for num_taken, token_id in enumerate(visible, start=1):
            texts.append(detokenizer.push(token_id))
            if detokenizer.stop_string is not None:
                return "".join(texts), num_taken
        if output.finish_reason is not None:
            texts.append(detokenizer.finish(end_token))
        return "".join(texts), len(token_ids)

    def _hidden_end_token(self, output: EngineCoreOutput) -> int | None:
        """Return the token that ended the answer and is not part of its text, if there is one."""
        if output.finish_reason != "stop" or not output.new_token_ids:
            return None
        token_id = output.new_token_ids[-1]
        params = self._params
        is_end_token = token_id in params.eos_token_ids or token_id in params.stop_token_ids
        if params.structured_outputs is not None and not is_end_token:
            return None  # the grammar has come to its end
        return None if params.include_stop_str_in_output else token_id

    def _delta(self, output: EngineCoreOutput, text: str, num_taken: int) -> OutputDelta:
        finish_reason = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        if self._detokenizer is not None and self._detokenizer.stop_string is not None:
            finish_reason, stop_reason = "stop", self._detokenizer.stop_string
        error = None
        if finish_reason == "error":
            kind = output.error_kind or "RequestFailedError"
            error = OutputError(kind, output.error or "The engine failed on this request.")
        return OutputDelta(
            request_id=self._request_id,
            index=self._index,
            text=text,
            token_ids=output.new_token_ids[:num_taken],
            logprobs=self._logprobs(output.logprobs, num_taken),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            error=error,
            prompt_logprobs=output.prompt_logprobs,
            scheduled_time=output.scheduled_time,
            num_preemptions=output.num_preemptions,
            pooled=output.pooled,
        )

    def _logprobs(
        self, logprobs: list[TokenLogprobs] | None, num_taken: int
    ) -> list[PositionLogprobs] | None:
        num_top = self._params.num_logprobs
        if logprobs is None or num_top is None:
            return None
        return [to_position(self._tokenizer, entry, num_top) for entry in logprobs[:num_taken]]


def _make_detokenizer(tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
