"""What is public, and what an import drags in."""

import subprocess
import sys

import pytest

import octavo_worker.executors
import octavo_worker.loading
import octavo_worker.models


def test_public_names():
    assert octavo_worker.executors.__all__ == ["create_executor"]
    assert octavo_worker.loading.__all__ == [
        "Checkpoint",
        "WeightForm",
        "load_weights",
        "open_checkpoint",
    ]
    assert octavo_worker.models.__all__ == [
        "KVCache",
        "Model",
        "ModelDefinition",
        "WeightEntry",
        "WeightPart",
        "has_definition",
        "resolve_model_class",
    ]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        # Only the worker process itself needs torch.
        ("octavo_worker.executors.multiproc", ["torch"]),
        # Each of these takes a second or more, and nothing here needs it.
        ("octavo_worker.worker", ["transformers", "torch._dynamo", "torch._inductor"]),
    ],
)
def test_heavy_imports_stay_out(module, absent):
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
