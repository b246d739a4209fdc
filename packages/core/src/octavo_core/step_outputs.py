"""Puts what the scheduler decided into the words of the worker and of the front."""

from __future__ import annotations

import msgspec

from octavo_core.block_manager import CachedPrefix
from octavo_core.errors import OctavoError
from octavo_core.pooling_params import PooledOutput
from octavo_core.request import Request, RequestStatus
from octavo_core.scheduler_output import ModelRunnerOutput, NewRequestData
from octavo_core.step import Step
from octavo_core.wire import EngineCoreOutput


def new_request_data(request: Request, prefix: CachedPrefix) -> NewRequestData:
    return NewRequestData(
        request.slot,
        request.request_id,
        list(request.token_ids),
        request.num_prompt_tokens,
        request.sampling_params,
        # A hole is never read, but the wire has no word for it.
        [[max(block_id, 0) for block_id in table] for table in request.block_tables],
        prefix.num_tokens,
        request.pooling_params,
    )


def report(request: Request, new_token_ids: list[int]) -> EngineCoreOutput:
    """Return the first output of a request since it got its slot, or its last one.

    Both tell more than the tokens: how it was scheduled, and how it ended if it did.
    """
    return EngineCoreOutput(
        request.request_id,
        new_token_ids,
        request.status.finish_reason,
        request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        prompt_logprobs=request.take_prompt_logprobs(),
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
    )


def pooled_output(request: Request, pooled: PooledOutput) -> EngineCoreOutput:
    """Return the one output of a request whose text is pooled."""
    return EngineCoreOutput(
        request.request_id,
        [],
        request.status.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        scheduled_time=request.scheduled_time,
        num_preemptions=request.num_preemptions,
        pooled=pooled,
    )


def failure(request_id: str, error: OctavoError) -> EngineCoreOutput:
    """Return the one last output of a request that was refused or has failed."""
    return EngineCoreOutput(
        request_id,
        [],
        RequestStatus.FINISHED_ERROR.finish_reason,
        error=str(error),
        error_kind=type(error).__name__,
    )


def collect_prompt_logprobs(step: Step, output: ModelRunnerOutput) -> None:
    """Keep what a step tells about prompts until their first token.

    A prompt that was preempted half-way is computed once more: what is known already of it
    is left out.
    """
    for index, entries in output.prompt_logprobs.items():
        request = step.requests[index]
        if request.prompt_logprobs is not None:
            num_known = len(request.prompt_logprobs) - step.starts[index]
            assert num_known >= 0, "a prompt's log-probabilities have a gap"
            request.prompt_logprobs += entries[num_known:]


def with_logprobs(
    step: Step, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]
) -> list[EngineCoreOutput]:
    by_id = {
        step.requests[index].request_id: logprobs for index, logprobs in output.logprobs.items()
    }
    return [
        msgspec.structs.replace(item, logprobs=[by_id[item.request_id]])
        if item.request_id in by_id
        else item
        for item in outputs
    ]
