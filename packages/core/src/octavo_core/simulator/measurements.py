"""What all replicas of a simulation count, in memory that does not grow with the trace."""

from __future__ import annotations

from collections import Counter

from octavo_core.simulator.quantiles import QuantileSketch
from octavo_core.simulator.timeline import Timeline


class Measurements:
    """Latencies and totals of one simulation.

    Attributes:
        time_to_first_token: Seconds from arrival to the first token.
        inter_token_latency: Seconds between two tokens of an answer; one value for each gap.
        time_per_output_token: One value for each answer, the mean of its gaps.
        end_to_end: Seconds from arrival to the last token.
        refusals: Requests that were not taken, by the name of the error.
        usage_seconds: KV cache usage (0 to 1) times seconds, over all replicas.
    """

    def __init__(self) -> None:
        self.time_to_first_token = QuantileSketch()
        self.inter_token_latency = QuantileSketch()
        self.time_per_output_token = QuantileSketch()
        self.end_to_end = QuantileSketch()
        self.refusals: Counter[str] = Counter()
        self.timeline = Timeline()
        self.num_requests = 0
        self.num_finished = 0
        self.num_failed = 0
        self.num_steps = 0
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_rows = 0
        self.busy_seconds = 0.0
        self.usage_seconds = 0.0
        self.peak_usage = 0.0
        self.end = 0.0
