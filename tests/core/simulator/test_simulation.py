"""Traces whose times can be told by hand, and what holds for every trace."""

from __future__ import annotations

import msgspec
import pytest

from octavo_core.errors import ConfigError
from octavo_core.simulator.generate import TraceShape, generate_trace
from octavo_core.simulator.simulation import Simulation, simulate
from support.simulations import FAST_COST_MODEL, arrival, deployment


def test_one_request_alone() -> None:
    """A prompt of 100 tokens takes 1.1 s, each further token 1.001 s."""
    report = simulate([arrival(5.0, 100, 4)], deployment())
    assert report.ttft.mean == pytest.approx(1.1)
    assert report.itl.mean == report.itl.max == pytest.approx(1.001)
    assert report.tpot.mean == pytest.approx(1.001)
    assert report.e2e.mean == pytest.approx(1.1 + 3 * 1.001)
    assert report.duration == pytest.approx(5.0 + 1.1 + 3 * 1.001)
    assert (report.num_steps, report.input_tokens, report.output_tokens) == (4, 100, 4)
    assert report.requests_per_second == pytest.approx(1 / report.duration)
    # 100 tokens and the three that follow lie in 7 of 100 blocks.
    assert report.kv_cache_usage_peak == pytest.approx(0.07)
    assert report.utilization == pytest.approx(1 - 5.0 / report.duration)


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    """The second one's prompt joins the first one's second step, and delays its token."""
    trace = [arrival(0.0, 100, 3), arrival(0.5, 50, 2)]
    report = simulate(trace, deployment(enable_prefix_caching=False))
    # Steps end at 1.1 (a prompt of 100), 2.151 (1 + 50 tokens) and 3.153 (2 tokens).
    assert report.num_steps == 3
    assert report.duration == pytest.approx(3.153)
    assert report.ttft.max == pytest.approx(2.151 - 0.5)
    assert report.ttft.mean == pytest.approx((1.1 + 1.651) / 2)
    assert report.itl.max == pytest.approx(1.051)
    assert report.itl.mean == pytest.approx((1.051 + 1.002 + 1.002) / 3)
    assert report.itl.p50 == pytest.approx(1.002)
    assert report.e2e.mean == pytest.approx((3.153 + 2.653) / 2)


def test_a_prompt_in_chunks_has_its_first_token_after_the_last_chunk() -> None:
    report = simulate([arrival(0.0, 100, 2)], deployment(max_num_batched_tokens=40))
    # 40, 40 and 20 tokens, then one.
    assert report.num_steps == 4
    assert report.ttft.mean == pytest.approx(3.1)
    assert report.itl.mean == pytest.approx(1.001)


def test_a_decoding_request_that_misses_a_step_has_a_longer_gap() -> None:
    """With a budget of one token, two requests take turns or one waits; no gap is lost."""
    trace = [arrival(0.0, 1, 5), arrival(0.0, 1, 5)]
    report = simulate(trace, deployment(max_num_batched_tokens=1))
    assert report.num_steps == 10
    assert report.output_tokens == 10
    gaps = report.itl.mean * 8
    # All gaps of an answer add up to the time from its first to its last token.
    assert gaps == pytest.approx(report.tpot.mean * 2 * 4)
    assert gaps == pytest.approx((report.e2e.mean - report.ttft.mean) * 2)


def test_preemption_is_counted_and_its_gap_is_one_long_one() -> None:
    """Two requests of 4 blocks each when done do not fit in 6."""
    trace = [arrival(0.0, 30, 30), arrival(0.0, 30, 30)]
    simulation = Simulation(deployment(num_blocks=6, max_model_len=64))
    report = simulation.run(trace)
    assert report.num_preemptions >= 1
    assert report.num_finished == 2
    assert report.kv_cache_usage_peak == pytest.approx(1.0)
    assert report.itl.max > 10
    assert report.itl.mean * 58 == pytest.approx((report.e2e.mean - report.ttft.mean) * 2)


def test_a_shared_prefix_is_computed_once() -> None:
    trace = [
        arrival(0.0, 64, 1, prefix_group="a", prefix_tokens=48),
        arrival(10.0, 64, 1, prefix_group="a", prefix_tokens=48),
        arrival(20.0, 64, 1, prefix_group="b", prefix_tokens=48),
    ]
    report = simulate(trace, deployment())
    assert report.prefix_cache_hit_rate == pytest.approx(48 / (3 * 64))
    assert report.ttft.p50 == report.ttft.max == pytest.approx(1.064)
    assert report.ttft.mean == pytest.approx(1 + (64 + 16 + 64) / 3000)


def test_the_policy_decides_who_goes_first() -> None:
    """One slot, taken at 0; then an urgent request overtakes one that came before it."""
    trace = [
        arrival(0.0, 10, 5),
        arrival(0.1, 10, 1),
        arrival(0.2, 10, 1, priority=-1),
    ]
    times = {}
    for policy in ("fcfs", "priority"):
        target = deployment(max_num_seqs=1, scheduling_policy=policy)
        times[policy] = simulate(trace, target).ttft.max
    # The first one ends at 5.014 s, and each of the others takes 1.01 s.
    assert times["fcfs"] == pytest.approx(5.014 + 2 * 1.01 - 0.2)
    assert times["priority"] == pytest.approx(5.014 + 2 * 1.01 - 0.1)


def test_requests_that_never_fit_are_refused_and_counted() -> None:
    trace = [arrival(0.0, 2000, 1), arrival(0.0, 10, 1)]
    report = simulate(trace, deployment())
    assert (report.num_refused, report.num_finished) == (1, 1)
    assert report.refusals == {"ContextLengthError": 1}
    assert report.input_tokens == 10


def test_an_empty_trace_has_an_empty_report() -> None:
    report = simulate([], deployment())
    assert (report.num_requests, report.duration, report.ttft.mean) == (0, 0.0, 0.0)
    assert report.timeline == []


SHAPES = [
    TraceShape(num_requests=300, rate=40.0, prompt_tokens=100, output_tokens=40, seed=1),
    TraceShape(
        num_requests=300,
        rate=400.0,
        prompt_tokens=30,
        output_tokens=60,
        shared_prefix=50,
        num_prefix_groups=10,
        length_spread=1.0,
        seed=2,
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("router", ["least_loaded", "prefix_affinity", "power_of_two"])
def test_every_token_comes_out_and_every_block_comes_back(
    shape: TraceShape, num_replicas: int, router: str
) -> None:
    target = deployment(
        num_blocks=60,  # few, so that requests are preempted
        max_num_batched_tokens=128,
        max_num_seqs=16,
        max_model_len=900,
        cost_model=FAST_COST_MODEL,
        num_replicas=num_replicas,
        router=router,
    )
    simulation = Simulation(target)
    report = simulation.run(generate_trace(shape))
    entries = list(generate_trace(shape))
    fitting = [
        entry
        for entry in entries
        if entry.num_prompt_tokens < 900 and entry.num_prompt_tokens + entry.output_tokens <= 900
    ]
    assert len(fitting) == len(entries)
    assert report.num_finished == report.num_requests == 300
    assert report.output_tokens == sum(entry.output_tokens for entry in entries)
    assert report.input_tokens == sum(entry.num_prompt_tokens for entry in entries)
    if num_replicas == 1:
        assert report.num_preemptions > 0
    for replica in simulation.replicas:
        assert replica.scheduler.stats().kv_cache_usage == 0
        assert replica.scheduler.running == ()
        assert not replica.scheduler.has_unfinished_requests()
    measured = simulation.measurements
    assert measured.time_to_first_token.count == 300
    # One gap between any two tokens of an answer, and the gaps fill the time between them.
    assert measured.inter_token_latency.count == report.output_tokens - 300
    assert measured.inter_token_latency.total == pytest.approx(
        measured.end_to_end.total - measured.time_to_first_token.total
    )


def test_equal_simulations_have_equal_reports() -> None:
    target = deployment(
        cost_model=FAST_COST_MODEL, num_replicas=3, router="power_of_two", seed=4, num_blocks=60
    )
    first, second = (simulate(generate_trace(SHAPES[1]), target) for _ in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    other = msgspec.structs.replace(target, seed=5)
    assert simulate(generate_trace(SHAPES[1]), other) != first


def test_more_replicas_serve_more() -> None:
    shape = msgspec.structs.replace(SHAPES[0], rate=float("inf"))
    one, four = (
        simulate(
            generate_trace(shape),
            deployment(cost_model=FAST_COST_MODEL, num_replicas=count, num_blocks=200),
        )
        for count in (1, 4)
    )
    assert four.requests_per_second > 3 * one.requests_per_second
    assert four.requests_per_replica_max - four.requests_per_replica_min <= 30


def test_a_deployment_without_replicas_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_replicas is 0"):
        deployment(num_replicas=0)
