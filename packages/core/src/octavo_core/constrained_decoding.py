"""How a request under a grammar goes on, and why it can fail."""

from __future__ import annotations

from collections.abc import Iterable

from octavo_core.errors import InvalidRequestError, OctavoError, RequestFailedError, UserError
from octavo_core.request import Request, RequestStatus


def append_constrained(request: Request, token_id: int) -> OctavoError | None:
    """Append a token, and those that the grammar leaves no choice about after it.

    The request's status says whether it ends here.

    Returns:
        Why the request has failed, if its matcher raised.
    """
    request.token_ids.append(token_id)
    if request.ends_with(token_id):
        return None
    try:
        _advance(request, token_id)
    except Exception as error:
        return reason_of_failure(request, error, is_updating=True)
    return None


def _advance(request: Request, token_id: int) -> None:
    matcher = request.matcher
    assert matcher is not None
    matcher.accept_tokens([token_id])
    # Where log-probabilities are wanted, every token has to have been sampled.
    if request.sampling_params.num_logprobs is None:
        for forced in matcher.take_forced_tokens():
            request.token_ids.append(forced)
            if request.ends_with(forced):
                return
    if matcher.is_terminated:
        request.status = RequestStatus.FINISHED_STOPPED


def tell_forced_tokens(requests: Iterable[Request]) -> list[tuple[int, list[int]]]:
    """Return pairs of slot and tokens that were forced since the worker heard of it last."""
    forced = []
    for request in requests:
        if request.num_untold_tokens:
            forced.append((request.slot, request.token_ids[-request.num_untold_tokens :]))
            request.num_untold_tokens = 0
    return forced


def reason_of_failure(request: Request, error: Exception, *, is_updating: bool) -> OctavoError:
    """Tell a user's mistake from ours after a matcher has raised.

    Args:
        request: The one under the grammar.
        error: What was raised.
        is_updating: It was raised by a token that was sampled, not by making the mask.
    """
    if isinstance(error, UserError):
        return error
    if is_updating and _forbids_tokens(request):
        # What was sampled is allowed by neither: nothing was left.
        return InvalidRequestError(
            "structured_outputs and allowed_token_ids, bad_words or min_tokens together leave "
            "no token that may come next; change one of them.",
            field="structured_outputs",
        )
    _log_failed_grammar(request, error)
    return RequestFailedError(f"The grammar of request {request.request_id} failed: {error}")


def _forbids_tokens(request: Request) -> bool:
    """True if the request forbids tokens by other means than its grammar."""
    params = request.sampling_params
    return bool(params.allowed_token_ids is not None or params.bad_words or params.min_tokens)


def _log_failed_grammar(request: Request, error: Exception) -> None:
    # Imported where it is needed, as a scheduler alone never does: 20 ms.
    import logging

    logging.getLogger(__name__).error(
        "The grammar of request %s failed", request.request_id, exc_info=error
    )
