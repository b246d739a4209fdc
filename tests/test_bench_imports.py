"""What the scripts of bench/ import from the packages is there: no other test runs them."""

import ast
import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def _imports(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo_"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("script", sorted(BENCH.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_bench_imports_is_there(script):
    for module, name in _imports(script):
        if not hasattr(importlib.import_module(module), name):
            spec = importlib.util.find_spec(f"{module}.{name}")
            assert spec is not None, f"{module} has no {name}"
