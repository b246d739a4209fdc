"""Settings: logs and metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Logs and metrics."""

    json_logs: Annotated[bool, Meta(description="Log one JSON object a line.")] = False
    access_log: Annotated[bool, Meta(description="Log a line for each HTTP request.")] = False
    log_stats_interval: Annotated[
        float,
        Meta(ge=0, description="Seconds between two lines about load and throughput; 0 is none."),
    ] = 10.0
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="Where to send OpenTelemetry's spans, for example "
            "http://localhost:4318/v1/traces."
        ),
    ] = None
    metrics_prefix: Annotated[
        str,
        Meta(
            pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$",
            description="What the names of metrics start with; the default keeps dashboards that "
            "were made for vLLM.",
        ),
    ] = "vllm:"
