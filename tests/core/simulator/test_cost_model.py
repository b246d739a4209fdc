from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo_core.errors import ConfigError
from octavo_core.scheduler_output import SchedulerOutput
from octavo_core.simulator.calibration import Observation, fit_cost_model
from octavo_core.simulator.cost_model import (
    CostModel,
    StepLoad,
    read_cost_model,
    step_load,
    write_cost_model,
)
from octavo_core.simulator.least_squares import solve_non_negative
from octavo_core.simulator.model_work import ModelWork
from octavo_core.simulator.roofline import (
    BANDWIDTH_EFFICIENCY,
    FLOPS_EFFICIENCY,
    ROW_OVERHEAD,
    STEP_OVERHEAD,
    roofline_cost_model,
)

TRUE = CostModel(
    step_seconds=0.02,
    token_knots=(0, 4, 16, 64, 256),
    token_seconds=(0.0, 1e-4, 5e-4, 1e-3, 1.1e-3),
    row_seconds=3e-5,
    sample_seconds=2e-4,
    context_seconds=1e-6,
    pair_seconds=2e-8,
)


def loads(seed: int, count: int) -> list[StepLoad]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        rows, prompt = draw.choice([1, 2, 4, 8, 16, 32]), draw.choice([0, 0, 1, 10, 50, 100, 500])
        context = rows * draw.randint(1, 1000) + prompt
        found.append(
            StepLoad(
                rows + prompt,
                rows + (prompt > 0),
                rows + (prompt > 10),
                context,
                prompt * (prompt + 1) // 2,
            )
        )
    return found


def test_the_formula() -> None:
    model = CostModel(
        step_seconds=1.0,
        token_knots=(0, 10, 100),
        token_seconds=(0.0, 0.01, 0.1),
        row_seconds=0.5,
        sample_seconds=0.25,
        context_seconds=0.001,
        pair_seconds=0.0001,
        swap_seconds=2.0,
    )
    assert model.seconds(StepLoad(8, 1, 0, 0, 0)) == pytest.approx(1.5)
    assert model.seconds(StepLoad(60, 2, 1, 100, 10)) == pytest.approx(1 + 0.5 + 1 + 0.25 + 0.101)
    assert model.seconds(StepLoad(8, 1, 0, 0, 0, 3)) == pytest.approx(7.5)
    assert model.seconds(StepLoad(110, 1, 0, 0, 0)) == pytest.approx(1 + 0.9 + 1 + 0.5)


def test_what_a_step_loads() -> None:
    step = SchedulerOutput(1, [], [], [], [0, 1, 2], [1, 5, 1], [40, 10, 7])
    # Keys read: 41, 15 and 8; pairs of the row with 5 tokens: 11 + 12 + 13 + 14 + 15.
    assert step_load(step, 2) == StepLoad(7, 3, 2, 64, 65)
    decode = SchedulerOutput(2, [], [], [], [0, 2], [1, 1], [41, 8])
    assert step_load(decode, 2) == StepLoad(2, 2, 2, 51, 0)


def test_a_fit_finds_the_model_that_made_the_times() -> None:
    observations = [Observation(load, TRUE.seconds(load)) for load in loads(1, 100)]
    fitted = fit_cost_model(observations, token_knots=TRUE.token_knots)
    for name, value in zip(
        ("step_seconds", "row_seconds", "sample_seconds", "context_seconds", "pair_seconds"),
        TRUE.coefficients()[:5],
        strict=True,
    ):
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-6), name
    assert fitted.token_seconds == pytest.approx(TRUE.token_seconds, rel=1e-6, abs=1e-12)
    assert fitted.median_error == pytest.approx(0, abs=1e-9)


def test_a_fit_stands_noise_and_outliers() -> None:
    draw = random.Random(2)
    observations = []
    for load in loads(1, 100):
        times = [TRUE.seconds(load) * draw.uniform(0.95, 1.05) for _ in range(3)]
        times[0] *= draw.choice([1, 1, 5])  # another process had the machine
        observations += [Observation(load, seconds) for seconds in times]
    fitted = fit_cost_model(observations)
    errors = [abs(fitted.seconds(load) / TRUE.seconds(load) - 1) for load in loads(3, 200)]
    assert sorted(errors)[180] < 0.1


def test_too_few_kinds_of_steps_are_refused() -> None:
    observations = [Observation(loads(1, 1)[0], 1.0)] * 100
    with pytest.raises(ConfigError, match="1 kinds of steps"):
        fit_cost_model(observations)


def test_least_squares_holds_at_zero_what_would_be_negative() -> None:
    # Without the bound the best line is 5 - 2 × x; with it, the mean.
    rows = [(1.0, float(x)) for x in range(4)]
    assert solve_non_negative(rows, [5, 3, 1, -1]) == pytest.approx([2, 0], abs=1e-9)
    assert solve_non_negative(rows, [1, 3, 5, 7]) == pytest.approx([1, 2])
    assert solve_non_negative([(1.0, 0.0)] * 3, [2, 2, 2]) == pytest.approx([2, 0])


def test_no_small_change_of_a_solution_is_better() -> None:
    draw = random.Random(5)
    for _ in range(20):
        rows = [[draw.gauss(0, 1) for _ in range(6)] for _ in range(15)]
        targets = [draw.gauss(0, 1) for _ in range(15)]
        solution = solve_non_negative(rows, targets)

        def error(x: list[float], rows: object = rows, targets: object = targets) -> float:
            return sum(
                (sum(a * b for a, b in zip(row, x, strict=True)) - target) ** 2
                for row, target in zip(rows, targets, strict=True)  # type: ignore[call-overload]
            )

        best = error(solution)
        assert min(solution) >= 0
        for index in range(6):
            for change in (-1e-3, 1e-3):
                other = list(solution)
                other[index] = max(0.0, other[index] + change)
                assert error(other) >= best - 1e-12


def test_a_file_reads_back_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    write_cost_model(path, TRUE)
    assert read_cost_model(path) == TRUE
    for text, reason in (
        ("{", "truncated"),
        ("{}", "step_seconds"),
        ('{"step_seconds": -1}', "step_seconds is -1"),
        ('{"step_seconds": 1e308}', r"step_seconds is 1e\+308; .* at most 1e\+06"),
        ('{"step_seconds": 1, "token_seconds": [1e308]}', "token_seconds is 1e.308"),
        ('{"step_seconds": 0}', "no time"),
        ('{"step_seconds": 1, "token_knots": [0, 1]}', "equally many"),
        ('{"step_seconds": 1, "token_knots": [1]}', "must start with 0"),
        ('{"step_seconds": 1, "token_seconds": [-1]}', "token_seconds is -1"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            read_cost_model(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_cost_model(tmp_path / "none.json")


def test_a_roofline_is_flat_until_arithmetic_takes_over() -> None:
    work = ModelWork(
        weights_bytes=16e9,
        token_flops=16e9,
        sample_flops=1e9,
        kv_bytes_per_token=131072,
        pair_flops=5e5,
    )
    model = roofline_cost_model(work, bandwidth=3.35e12, flops=989e12)
    reading = 16e9 / (3.35e12 * BANDWIDTH_EFFICIENCY)
    one, many = model.seconds(StepLoad(1, 1, 0, 0, 0)), model.seconds(StepLoad(64, 1, 0, 0, 0))
    assert one == pytest.approx(STEP_OVERHEAD + ROW_OVERHEAD + reading, rel=1e-2)
    assert many == pytest.approx(one, rel=1e-2)
    large = model.seconds(StepLoad(8192, 1, 0, 0, 0))
    arithmetic = 8192 * 16e9 / (989e12 * FLOPS_EFFICIENCY)
    assert large == pytest.approx(STEP_OVERHEAD + arithmetic, rel=0.02)


def test_a_mixture_reads_more_experts_the_more_tokens_there_are() -> None:
    work = ModelWork(
        weights_bytes=90e9,
        expert_bytes=88e9,
        expert_share=1 / 4,
        token_flops=25e9,
        sample_flops=1e9,
        kv_bytes_per_token=131072,
        pair_flops=5e5,
    )
    model = roofline_cost_model(work, bandwidth=1e12, flops=1e15)
    times = [model.seconds(StepLoad(count, 1, 0, 0, 0)) for count in (1, 4, 64)]
    read = [(2e9 + share * 88e9) / 0.75e12 for share in (0.25, 1 - 0.75**4, 1.0)]
    assert times == pytest.approx([STEP_OVERHEAD + seconds for seconds in read], rel=0.01)
