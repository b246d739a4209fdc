from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from octavo_core.errors import ConfigError
from octavo_core.simulator.generate import TraceShape, generate_trace
from octavo_core.simulator.trace import PromptMaker, TraceError, read_trace, write_trace
from support.simulations import arrival


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`"),
        ('{"time": 1, "prompt_tokens": 5}', "output_tokens"),
        ('{"time": "x", "prompt_tokens": 5, "output_tokens": 1}', "Expected `float`"),
        ('{"time": -1, "prompt_tokens": 5, "output_tokens": 1}', "time is -1"),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": 0}', "output_tokens is 0"),
        ('{"time": 1, "output_tokens": 1}', "one of prompt_tokens and prompt_token_ids"),
        (
            '{"time": 1, "prompt_tokens": 1, "prompt_token_ids": [1], "output_tokens": 1}',
            "one of prompt_tokens and prompt_token_ids",
        ),
        ('{"time": 1, "prompt_tokens": 0, "output_tokens": 1}', "the prompt is empty"),
        ('{"time": 1, "prompt_token_ids": [-1], "output_tokens": 1}', "no token id"),
        (
            '{"time": 1, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 6, '
            '"prefix_group": "a"}',
            "prefix_tokens is 6",
        ),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 2}', "prefix_group"),
        ('{"time": 0.5, "prompt_tokens": 5, "output_tokens": 1}', "before the line above"),
        ('{"time": 1e308, "prompt_tokens": 5, "output_tokens": 1}', "at most 1e+10 seconds"),
        (
            '{"time": 1, "prompt_tokens": 100000000000, "output_tokens": 2}',
            "prompt_tokens is 100000000000; it must be at most 10000000",
        ),
        (
            '{"time": 1, "prompt_tokens": 5, "output_tokens": 100000000000}',
            "output_tokens is 100000000000; it must be at most 10000000",
        ),
        (
            '{"time": 1, "prompt_tokens": 100000000000, "output_tokens": 2, '
            '"prefix_tokens": 99999999999, "prefix_group": "a"}',
            "at most 10000000",
        ),
        (
            '{"time": 1, "prompt_tokens": 5, "output_token": 2}',
            "no field 'output_token'; did you mean output_tokens?",
        ),
        (
            '{"time": 1, "prompt_tokens": 5, "output_tokens": 2, "zzz": 1}',
            "no field 'zzz'; known are time, output_tokens",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0.75, "prompt_tokens": 5, "output_tokens": 1}\n\n' + line + "\n")
    with pytest.raises(TraceError) as error:
        list(read_trace(path))
    assert f"{path}, line 3: " in str(error.value)
    assert reason in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none.jsonl"))


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    shape = TraceShape(num_requests=50, rate=3.0, shared_prefix=20, seed=9)
    path = tmp_path / "trace.jsonl"
    assert write_trace(path, generate_trace(shape)) == 50
    assert list(read_trace(path)) == list(generate_trace(shape))


def test_a_drawn_trace_has_the_shape_that_was_asked_for() -> None:
    shape = TraceShape(
        num_requests=5000, rate=20.0, prompt_tokens=300, output_tokens=50, length_spread=0.8, seed=3
    )
    entries = list(generate_trace(shape))
    assert len(entries) / entries[-1].time == pytest.approx(20, rel=0.1)
    lengths = [entry.num_prompt_tokens for entry in entries]
    assert statistics.mean(lengths) == pytest.approx(300, rel=0.05)
    assert statistics.stdev(lengths) == pytest.approx(240, rel=0.15)
    assert statistics.mean(entry.output_tokens for entry in entries) == pytest.approx(50, rel=0.05)
    assert all(first.time <= second.time for first, second in itertools.pairwise(entries))


def test_popular_groups_follow_zipf() -> None:
    shape = TraceShape(num_requests=5000, rate=20.0, shared_prefix=100, num_prefix_groups=50)
    groups = [entry.prefix_group for entry in generate_trace(shape)]
    first, tenth = groups.count("group-0"), groups.count("group-9")
    assert first / tenth == pytest.approx(10, rel=0.35)
    assert len(set(groups)) == 50


def test_a_shape_that_can_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate is 0"):
        TraceShape(num_requests=1, rate=0)
    with pytest.raises(ConfigError, match="prompt_tokens is 0"):
        TraceShape(num_requests=1, rate=1, prompt_tokens=0)


def test_a_drawn_trace_can_be_read_back_or_is_refused() -> None:
    with pytest.raises(ConfigError, match="shared_prefix is 10000000"):
        TraceShape(num_requests=1, rate=1, shared_prefix=10_000_000)
    with pytest.raises(ConfigError, match="rate is 1e-300"):
        list(generate_trace(TraceShape(num_requests=2, rate=1e-300)))


def test_prompts_share_exactly_what_their_group_shares() -> None:
    maker = PromptMaker()
    first = maker.make(arrival(0, 9000, 1, prefix_group="a", prefix_tokens=6000), 0)
    second = maker.make(arrival(0, 7000, 1, prefix_group="a", prefix_tokens=6000), 1)
    shorter = maker.make(arrival(0, 20, 1, prefix_group="a", prefix_tokens=20), 2)
    other = maker.make(arrival(0, 20, 1, prefix_group="b", prefix_tokens=20), 3)
    alone = maker.make(arrival(0, 20, 1), 4)
    assert (len(first), len(second), len(shorter)) == (9000, 7000, 20)
    assert first[:6000] == second[:6000]
    assert first[6000] != second[6000]
    assert shorter == first[:20]
    assert len({first[0], other[0], alone[0], first[6000], second[6000]}) == 5
