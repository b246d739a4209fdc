from __future__ import annotations

import octavo_core.simulator


def test_the_names_are_these() -> None:
    assert octavo_core.simulator.__all__ == [
        "CostModel",
        "Deployment",
        "Latency",
        "Report",
        "TraceEntry",
        "TraceError",
        "TraceShape",
        "generate_trace",
        "read_cost_model",
        "read_trace",
        "simulate",
        "write_cost_model",
        "write_trace",
    ]
    for name in octavo_core.simulator.__all__:
        assert hasattr(octavo_core.simulator, name)
