"""From a body's fields to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import SamplingParams
from octavo_server.api.protocol import CompletionRequest, GenerationRequest, SamplingBody
from octavo_server.api.structured_outputs import (
    OwnConstraint,
    response_format,
    to_structured_outputs,
)

# Fields that have the same name and meaning in a body and in `SamplingParams`.
_SAME = (
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


def shared_params(
    body: SamplingBody, defaults: Mapping[str, Any], own: OwnConstraint
) -> dict[str, Any]:
    """Merge the fields that all routes have over the model's defaults; null means not given.

    Args:
        own: What asks for a constraint in the API's own way.

    Returns:
        Arguments of `SamplingParams`.

    Raises:
        InvalidRequestError: Two fields contradict each other, or a key is no token id.
    """
    allowed = body.allowed_token_ids
    return {
        **defaults,
        **{name: value for name in _SAME if (value := getattr(body, name)) is not None},
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "logit_bias": _logit_bias(body.logit_bias),
        "allowed_token_ids": None if allowed is None else tuple(allowed),
        "bad_words": tuple(body.bad_words or ()),
        "structured_outputs": to_structured_outputs(body, own),
    }


def engine_options(body: SamplingBody, tenant: str | None) -> dict[str, Any]:
    """Return what the input processor is told beside the prompt and how to sample.

    Args:
        tenant: Whom the request is for, as the caller says.
    """
    return {
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt,
        "tenant": tenant,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a body, which may have one, several or none."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def to_sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Return the parameters of a completion or chat.

    Raises:
        InvalidRequestError: As in `shared_params`.
    """
    ids = body.logprob_token_ids
    return SamplingParams(
        **shared_params(body, defaults, response_format(body)),
        n=body.n or 1,
        max_tokens=max_tokens,
        # A chat's `logprobs: true` without a number means as many as there are ids.
        logprobs=None if ids and not logprobs else logprobs,
        stop=stop_strings(body.stop),
        prompt_logprobs=_prompt_logprobs(body),
        logprob_token_ids=None if ids is None else tuple(ids),
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
