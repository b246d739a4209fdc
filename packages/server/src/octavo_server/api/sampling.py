"""From a body's fields to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import SamplingParams
from octavo_server.api.protocol import (
    CompletionRequest,
    GenerationRequest,
)
from octavo_server.api.structured_outputs import to_structured_outputs

# Fields that have the same name and meaning in a body and in `SamplingParams`.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def to_sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Merge the body's fields over the model's defaults; null means not given.

    Raises:
        InvalidRequestError: Two fields contradict each other, or a key is no token id.
    """
    values = dict(defaults)
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    stop = body.stop or ()
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        # A chat's `logprobs: true` without a number means as many as there are ids.
        logprobs=None if body.logprob_token_ids and not logprobs else logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=(
            None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
        ),
        bad_words=tuple(body.bad_words or ()),
        prompt_logprobs=_prompt_logprobs(body),
        logprob_token_ids=(
            None if body.logprob_token_ids is None else tuple(body.logprob_token_ids)
        ),
        structured_outputs=to_structured_outputs(body),
    )


def _prompt_logprobs(body: GenerationRequest) -> int | None:
    echoed = body.echoed_logprobs if isinstance(body, CompletionRequest) else None
    wanted = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Read the token ids, which are strings in JSON.

    Raises:
        InvalidRequestError: A key is no token id, or two are the same one.
    """
    if not bias:
        return None
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()):
            raise InvalidRequestError(
                f"logit_bias has the key {key!r}; keys are token ids such as '1234'.",
                field="logit_bias",
            )
        if int(key) in by_id:
            raise InvalidRequestError(f"logit_bias has token {int(key)} twice.", field="logit_bias")
        by_id[int(key)] = value
    return by_id
