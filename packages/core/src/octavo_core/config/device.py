"""Settings: where the model runs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo_core.config.field_types import PositiveInt


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model runs."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto takes a GPU if there is one.")
    ] = "auto"
    cpu_threads: Annotated[
        PositiveInt | None,
        Meta(description="Threads on a CPU, divided among workers; by default all usable cores."),
    ] = None
    cpu_offload_gb: Annotated[
        float,
        Meta(
            ge=0,
            le=65536,
            description="GiB of weights that each worker of a GPU keeps in host memory and copies "
            "layer by layer in every step; 0 keeps all on the device.",
        ),
    ] = 0.0
