"""Refuses requests that no scheduler could ever complete."""

from __future__ import annotations

import math

from octavo_core.block_manager import BlockManager
from octavo_core.errors import ContextLengthError, InvalidRequestError
from octavo_core.request import Request


def check_values(request: Request) -> None:
    """Refuse what would fail much later, in the middle of a step.

    Raises:
        InvalidRequestError: A value can't be.
    """
    if request.token_ids and not 0 <= min(request.token_ids) <= max(request.token_ids) < 1 << 31:
        raise InvalidRequestError(
            f"prompt has the token id {min(request.token_ids)} or {max(request.token_ids)}; ids "
            f"are from 0 to 2147483647.",
            field="prompt",
        )
    if request.deadline is not None and not math.isfinite(request.deadline):
        raise InvalidRequestError(
            f"deadline is {request.deadline}; it must be a time.", field="deadline"
        )
    if request.num_output_tokens and request.num_tokens >= request.max_total_tokens:
        raise InvalidRequestError(
            f"the request has {request.num_output_tokens} tokens of its answer already, and "
            f"max_tokens or the context allows no more.",
            field="max_tokens",
        )


def check_fits(request: Request, blocks: BlockManager, max_model_len: int) -> None:
    """Refuse what prompt and answer together never have room for.

    Raises:
        InvalidRequestError: The prompt is empty.
        ContextLengthError: The context or the whole KV cache is too small.
    """
    if request.num_prompt_tokens == 0:
        raise InvalidRequestError("the prompt is empty; it needs a token.", field="prompt")
    is_pooled = request.pooling_params is not None
    if request.num_tokens >= max_model_len + is_pooled:
        if is_pooled:
            raise ContextLengthError(
                f"The text has {request.num_tokens} tokens, but the context has {max_model_len} "
                f"(max_model_len); shorten it, or let truncate_prompt_tokens do so.",
                field="input",
            )
        raise ContextLengthError(
            f"The prompt has {request.num_tokens} tokens, but the context of "
            f"{max_model_len} tokens (max_model_len) must also hold at least one token of "
            f"the answer.",
            field="prompt",
        )
    if blocks.most_blocks_held(request.max_total_tokens - is_pooled) > blocks.pool.num_blocks:
        raise ContextLengthError(
            f"The prompt has {request.num_prompt_tokens} tokens and max_tokens asks for up to "
            f"{request.max_total_tokens - request.num_prompt_tokens} more, but the whole KV "
            f"cache holds {blocks.num_tokens_alone} tokens; shorten the prompt, lower "
            f"max_tokens, or give the server more --kv-cache-memory.",
            field="max_tokens",
        )
