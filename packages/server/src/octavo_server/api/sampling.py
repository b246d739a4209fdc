"""From a body's fields to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo_core.sampling_params import SamplingParams
from octavo_server.api.protocol import GenerationRequest
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
        InvalidRequestError: Two fields contradict each other.
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
        logprobs=logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        structured_outputs=to_structured_outputs(body),
    )
