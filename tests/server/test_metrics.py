"""Histograms and the arithmetic of times, with times that the test sets."""

from __future__ import annotations

import pytest

from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.metrics import Histogram, ServingMetrics
from octavo_server.request_output import OutputDelta


def make_request(**fields: object) -> EngineCoreRequest:
    values = {"request_id": "r", "prompt_token_ids": [1] * 10, "arrival_time": 100.0, **fields}
    return EngineCoreRequest(sampling_params=SamplingParams(max_tokens=5), **values)  # type: ignore[arg-type]


def make_delta(num_tokens: int = 1, **fields: object) -> OutputDelta:
    values = {"request_id": "r", "index": 0, "text": "", "token_ids": [7] * num_tokens, **fields}
    return OutputDelta(**values)  # type: ignore[arg-type]


def test_a_histogram_counts_a_bound_as_inside() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 9.0):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [(1.0, 2), (2.0, 3), (5.0, 4)]
    assert list(histogram.cumulative(limit=2.0)) == [(1.0, 2), (2.0, 3)]
    assert (histogram.count, histogram.sum) == (5, 17.0)


def test_the_times_of_one_answer() -> None:
    metrics = ServingMetrics()
    (progress,) = metrics.start([make_request()], now=100.5)
    metrics.add(progress, make_delta(scheduled_time=102.0, num_cached_tokens=4), 103.0)
    metrics.end_step()
    metrics.add(progress, make_delta(2, num_preemptions=1, scheduled_time=105.0), 104.5)
    metrics.add(progress, make_delta(1, finish_reason="length", num_preemptions=2), 106.0)
    metrics.end_step()
    sums = {
        "time_to_first_token": 3.0,
        "inter_token_latency": 1.5 + 1.5,
        "time_per_output_token": 3.0 / 3,
        "e2e_latency": 6.0,
        "queue_time": 2.0,
        "prefill_time": 1.0,
        "decode_time": 3.0,
        "inference_time": 4.0,
        "prompt_tokens": 10,
        "generation_tokens": 4,
        "prefill_computed_tokens": 6,
        "params_max_tokens": 5,
        "preemptions": 2,
        "step_tokens": 6 + 1 + 3,
        "params_n": 1,
    }
    for name, value in sums.items():
        assert getattr(metrics, name).sum == pytest.approx(value), name
    assert metrics.finished["length"] == 1
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (10, 4)


def test_a_scored_prompt_has_no_tokens_of_an_answer() -> None:
    """The engine makes one to get at the prompt; with ``max_tokens`` 0 nobody gets to see it."""
    metrics = ServingMetrics()
    (progress,) = metrics.start([make_request()], now=100.5)
    progress.is_scored = True
    metrics.add(progress, make_delta(finish_reason="length"), 103.0)
    metrics.end_step()
    assert metrics.num_generation_tokens == 0
    assert metrics.generation_tokens.sum == metrics.params_max_tokens.sum == 0
    assert metrics.step_tokens.sum == metrics.num_prompt_tokens == 10
    assert metrics.finished["length"] == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_is_not_complete_has_no_latency(reason: str) -> None:
    metrics = ServingMetrics()
    (progress,) = metrics.start([make_request()], now=100.5)
    metrics.add(progress, make_delta(), 103.0)
    metrics.finish(progress, reason, 104.0)
    assert metrics.finished[reason] == 1
    assert metrics.e2e_latency.count == 0
    assert metrics.time_to_first_token.count == 1


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    metrics = ServingMetrics()
    (progress,) = metrics.start([make_request()], now=100.0)
    metrics.add(progress, make_delta(finish_reason="stop", scheduled_time=90.0), 50.0)
    assert metrics.e2e_latency.sum == metrics.queue_time.sum == metrics.prefill_time.sum == 0


def test_choices_of_one_request_count_its_longest_once() -> None:
    metrics = ServingMetrics()
    first, second = metrics.start([make_request(), make_request()])
    metrics.add(first, make_delta(3, finish_reason="length"), 101.0)
    assert metrics.max_generation_tokens.count == 0
    metrics.add(second, make_delta(2, finish_reason="length"), 102.0)
    assert (metrics.max_generation_tokens.count, metrics.max_generation_tokens.sum) == (1, 3)
    assert metrics.params_n.sum == 2
