from __future__ import annotations

import random

import pytest

from octavo_core.simulator import quantiles
from octavo_core.simulator.quantiles import QuantileSketch
from octavo_core.simulator.timeline import MAX_INTERVALS, Timeline


def test_few_values_are_exact() -> None:
    sketch = QuantileSketch()
    for value in (3.0, 1.0, 2.0):
        sketch.add(value)
    sketch.add(10.0, 7)
    assert (sketch.count, sketch.mean, sketch.max) == (10, 7.6, 10.0)
    assert [sketch.quantile(share) for share in (0.1, 0.2, 0.3, 0.31, 1.0)] == [1, 2, 3, 10, 10]
    assert sketch.cumulative() == [(1.0, 0.1), (2.0, 0.2), (3.0, 0.3), (10.0, 1.0)]


def test_no_values_are_zero() -> None:
    assert (QuantileSketch().mean, QuantileSketch().quantile(0.99)) == (0.0, 0.0)


def test_many_values_stay_close_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantiles, "MAX_EXACT_VALUES", 1000)
    draw = random.Random(1)
    values = [draw.lognormvariate(0, 2) for _ in range(20_000)] + [0.0]
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    values.sort()
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        exact = values[int(share * len(values))]
        assert sketch.quantile(share) == pytest.approx(exact, rel=0.005)
    assert sketch.mean == pytest.approx(sum(values) / len(values))
    assert sketch.quantile(1) <= sketch.max == values[-1]
    assert len(sketch.cumulative()) < 9000


def test_a_timeline_keeps_its_sums_when_it_merges() -> None:
    timeline = Timeline()
    for second in range(1000):
        timeline.add(float(second), 0.5, tokens=10, running=2, waiting=4, usage=0.25)
    intervals = timeline.intervals()
    assert len(intervals) <= MAX_INTERVALS
    tokens = sum(interval.output_tokens_per_second * timeline.interval for interval in intervals)
    assert tokens == pytest.approx(10_000)
    used = [interval for interval in intervals if interval.num_running]
    assert all(interval.num_running == pytest.approx(2) for interval in used)
    assert all(interval.num_waiting == pytest.approx(4) for interval in used)
    assert all(interval.kv_cache_usage == pytest.approx(0.25) for interval in used)
