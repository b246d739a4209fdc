"""`octavo simulate`: what the server adds to core's command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_core.config import resolve_config
from octavo_core.simulator.cost_model import read_cost_model
from octavo_server import calibration
from octavo_server.__main__ import main
from octavo_server.calibration import CalibrationRun, Calibrator, start_engine
from support.engine_fakes import FakeExecutor
from support.tiny_models import write_folder

SETTINGS = {"max_num_seqs": 8, "num_gpu_blocks_override": 2000}


class CpuExecutor(FakeExecutor):
    """Says that it is slow, so that no long steps are measured."""

    device = "cpu"


@pytest.fixture(autouse=True)
def executor(monkeypatch: pytest.MonkeyPatch) -> CpuExecutor:
    made = CpuExecutor(block_size=16, num_slots=8)
    # In place of the worker package, which the server's own tests do without.
    monkeypatch.setattr(calibration, "create_executor", lambda config, spec: made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture
def run(folder: Path) -> Iterator[CalibrationRun]:
    started = start_engine(resolve_config(keywords={"model": str(folder), **SETTINGS}))
    yield started
    started.engine.shutdown()


def test_a_round_measures_every_kind_of_step(run: CalibrationRun) -> None:
    calibrator = Calibrator(run)
    calibrator.measure_round()
    loads = [observation.load for observation in calibrator.observations]
    assert all(observation.seconds > 0 for observation in calibrator.observations)
    decode_rows = {load.num_rows for load in loads if load.num_tokens == load.num_rows}
    assert {1, 2, 4, 8} <= decode_rows  # and no more than max_num_seqs
    assert max(decode_rows) == 8
    assert any(load.num_rows == 1 and load.num_tokens > 30 for load in loads)
    assert any(load.num_rows == 5 and load.num_tokens > 20 for load in loads)  # mixed
    assert calibrator.fit().seconds(loads[-1]) > 0


def test_calibrate_writes_a_cost_model_that_simulates(
    folder: Path,
    executor: CpuExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibration, "NUM_ROUNDS", 1)
    path = tmp_path / "cost.json"
    settings = ["--max-num-seqs", "8", "--num-gpu-blocks-override", "2000"]
    command = ["simulate", "--calibrate", "--model", str(folder), "-o", str(path), *settings]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "on cpu, measured" in out
    assert "decoding 8 requests" in err
    assert executor.is_shut_down
    assert read_cost_model(path).median_error is not None
    args = ["simulate", "--generate", "20", "--prompt-tokens", "20", "--output-tokens", "5"]
    assert main([*args, "--model", str(folder), "--cost-model", str(path)]) == 0
    assert "20 of 20 requests" in capsys.readouterr().out


def test_calibrate_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--calibrate"]) == 2
    assert "-o cost.json" in capsys.readouterr().err
