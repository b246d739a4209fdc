"""Settings: what a step may hold."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from octavo_core.config.field_types import TOKENS, PositiveInt


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may hold."""

    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="Token budget of one step.", extra=TOKENS)
    ] = 2048
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=65536, description="Most requests that run at once.")
    ] = 128
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0,
            description="Most tokens of one prompt in a step, so that a long prompt leaves room "
            "for others; 0 means the whole budget, or half of it while others could start.",
            extra=TOKENS,
        ),
    ] = 0
    scheduling_policy: Annotated[
        str,
        Meta(
            description="Who goes first: fcfs, priority, fair_share, or one that an installed "
            "package adds."
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        int, Meta(ge=1, description="Most requests in the server; further ones get a 429.")
    ] = 4096
    max_num_queued_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Most tokens of waiting requests; further requests get a 429. "
            "0 means no limit.",
            extra=TOKENS,
        ),
    ] = 0
    batch_queue_size: Annotated[
        PositiveInt | None,
        Meta(
            description="Steps in flight at once; by default what the executor can overlap: "
            "1 for uni, else 2, or one for each pipeline stage."
        ),
    ] = None
