"""Which device and which type a model runs in, and how much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

# psutil publishes no types.
import psutil  # type: ignore[import-untyped]
import torch

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError, ModelError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CHECKPOINT_DTYPES = (*_DTYPES, "float64")
_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(config: EngineConfig, rank: int) -> torch.device:
    """Choose the device of one worker.

    Raises:
        ConfigError: A GPU was asked for, and there is none.
    """
    wanted = config.device.device
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", rank)
    if wanted == "cuda":
        raise ConfigError(
            f"device is cuda (from {config.source_of('device')}), but torch {torch.__version__} "
            f"finds no CUDA device; use --device cpu, or install a CUDA build of torch.",
            field="device",
        )
    return torch.device("cpu")


def resolve_dtype(wanted: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """Choose the type of weights and activations.

    ``auto`` is float32 on a CPU, where half types are slower without special
    instructions. On a GPU it is the checkpoint's type, and bfloat16 for one that is
    float32 or does not say.

    Args:
        wanted: ``auto``, or the name of a type.
        checkpoint: Type of the weights as they are stored, or None.
        device: Where the model will run.

    Raises:
        ModelError: The checkpoint's type is none that weights can have.
    """
    if checkpoint is not None and checkpoint not in _CHECKPOINT_DTYPES:
        raise ModelError(
            f"the model's config.json says dtype {checkpoint!r}; known are "
            f"{', '.join(_CHECKPOINT_DTYPES)}.",
            field="dtype",
        )
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def use_cpu_threads(wanted: int | None) -> int:
    """Set torch's threads to `wanted`, or to the cores this process may use; return them."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = wanted or usable or 1
    torch.set_num_threads(threads)
    return threads


def available_cpu_memory() -> int:
    """Return the bytes this process may still take: free memory, within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
