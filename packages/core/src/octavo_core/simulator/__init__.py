"""Replays a trace of arrivals through the real scheduler, on a virtual clock.

from octavo_core.simulator import CostModel, Deployment, TraceShape, generate_trace, simulate

device = CostModel(step_seconds=0.006, token_knots=(0, 256), token_seconds=(0.0, 2.5e-5))
deployment = Deployment(cost_model=device, num_blocks=8000, max_model_len=8192)
report = simulate(generate_trace(TraceShape(num_requests=1000, rate=20.0)), deployment)
print(report.ttft.p99, report.output_tokens_per_second)
"""

from octavo_core.simulator.cost_model import CostModel, read_cost_model, write_cost_model
from octavo_core.simulator.generate import TraceShape, generate_trace
from octavo_core.simulator.report import Latency, Report
from octavo_core.simulator.simulation import Deployment, simulate
from octavo_core.simulator.trace import TraceEntry, TraceError, read_trace, write_trace

__all__ = [
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
