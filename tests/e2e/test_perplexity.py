"""The packed path is as good a model as the exact one: perplexity on the start of a text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.timeout(600)

BENCH = Path(__file__).parents[2] / "bench" / "perplexity.py"
NUM_TOKENS = 600  # the bench takes the whole text


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("octavo_bench_perplexity", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_packed_weights_cost_less_than_half_a_percent(
    starter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_bench()
    monkeypatch.setenv("OCTAVO_KERNELS", "")
    exact = bench.measure(bench.EXACT, str(starter_path), NUM_TOKENS)
    packed = bench.measure(bench.DEFAULT, str(starter_path), NUM_TOKENS)
    assert packed == pytest.approx(exact, rel=0.005)
    assert packed != exact  # or it would be the same path twice
