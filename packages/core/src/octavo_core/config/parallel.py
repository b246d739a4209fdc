"""Settings: how many workers, and how they are reached."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers, and how they are reached."""

    distributed_executor_backend: Annotated[
        Literal["auto", "uni", "mp", "ray"],
        Meta(
            description="uni runs the worker inside the engine process, mp each worker in a "
            "process of its own, ray as actors of a Ray cluster; auto is uni for one worker and "
            "mp for several."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=1024, description="Workers that share each layer.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=1024, description="Groups of workers that follow each other.")
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1, le=256, description="Whole engines behind one server.")
    ] = 1
    heartbeat_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a sign of life after which the engine, a worker or one of "
            "several fronts counts as dead. A step may take longer.",
        ),
    ] = 6.0
    step_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds in one step after which the engine counts as dead, since a device "
            "that hangs stops no heartbeat; 0 waits for ever.",
        ),
    ] = 600.0

    @property
    def world_size(self) -> int:
        """Workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> str:
        """The executor: ``uni``, ``mp`` or ``ray``."""
        if self.distributed_executor_backend != "auto":
            return self.distributed_executor_backend
        return "uni" if self.world_size == 1 else "mp"
