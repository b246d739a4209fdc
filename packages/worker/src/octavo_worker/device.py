"""Which device and which type a model runs in, and how much memory there is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from octavo_core import memory_planner
from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError, ModelError
from octavo_kernels.cpu.threads import MAX_THREADS, set_num_threads
from octavo_worker.cpu_binding import num_usable_cpus
from octavo_worker.loading import WeightForm

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CHECKPOINT_DTYPES = (*_DTYPES, "float64")
# What computes bfloat16 without converting it each time: NVIDIA's from Ampere on.
_BFLOAT16_CAPABILITY = (8, 0)


def resolve_device(config: EngineConfig, rank: int) -> torch.device:
    """Choose the device of one worker.

    Raises:
        ConfigError: A GPU was asked for, and there is none.
    """
    wanted = config.device.device
    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        # Where each worker sees but one, as Ray has it, that is its own.
        return torch.device("cuda", rank % torch.cuda.device_count())
    if wanted == "cuda":
        raise ConfigError(
            f"device is cuda (from {config.source_of('device')}), but torch {torch.__version__} "
            f"finds no CUDA device; use --device cpu, or install a CUDA build of torch.",
            field="device",
        )
    return torch.device("cpu")


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return what a GPU of NVIDIA says of itself; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def check_offload(config: EngineConfig, device: torch.device, has_layers: bool) -> None:
    """Refuse to keep weights in host memory where that makes no difference, or can't be done.

    Args:
        config: All settings.
        device: Where the model will run.
        has_layers: Whether the model has a definition of ours, whose layers can be fetched.

    Raises:
        ConfigError: ``cpu_offload_gb`` is set all the same.
    """
    wanted = config.device.cpu_offload_gb
    if not wanted:
        return
    reason = ""
    if device.type == "cpu":
        reason = "the device is a CPU, whose weights are in host memory anyway; leave it out"
    elif not has_layers:
        reason = "the model runs through transformers, which keeps all weights on the device"
    if reason:
        raise ConfigError(
            f"cpu_offload_gb is {wanted:g} (from {config.source_of('cpu_offload_gb')}), but "
            f"{reason}.",
            field="cpu_offload_gb",
        )


class ChosenDtype(NamedTuple):
    """The type of weights and activations.

    Attributes:
        dtype: It.
        reason: Why it is another than the checkpoint's, in words for a log line; empty if it
            is not.
    """

    dtype: torch.dtype
    reason: str = ""


def choose_dtype(
    wanted: str,
    checkpoint: str | None,
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> ChosenDtype:
    """Choose the type of weights and activations, and say why.

    Args:
        wanted: ``auto``, or the name of a type.
        checkpoint: Type of the weights as they are stored, or None.
        device: Where the model will run.
        capability: Of a GPU of NVIDIA; None for other devices.

    Raises:
        ModelError: The checkpoint's type is none that weights can have.
        ConfigError: The device doesn't have the type.
    """
    dtype = resolve_dtype(wanted, checkpoint, device)
    reason = ""
    if capability is not None and dtype == torch.bfloat16 and capability < _BFLOAT16_CAPABILITY:
        shown = ".".join(map(str, capability))
        if wanted != "auto":
            raise ConfigError(
                f"dtype is bfloat16, which needs a GPU of compute capability 8.0, and {device} "
                f"has {shown}; use --dtype float16.",
                field="dtype",
            )
        return ChosenDtype(
            torch.float16, f"{device} has compute capability {shown}, and bfloat16 needs 8.0"
        )
    name = str(dtype).removeprefix("torch.")
    if name == checkpoint:
        return ChosenDtype(dtype)
    if wanted != "auto":
        reason = "as asked"
    elif device.type == "cpu":
        reason = "a CPU computes in float32"
    elif checkpoint is not None:
        reason = "half the memory, twice the speed"
    else:
        reason = "what most checkpoints have"
    return ChosenDtype(dtype, reason)


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


def resolve_weight_form(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, *, can_pack: bool = True
) -> WeightForm:
    """Choose how weights are kept.

    The CPU kernels compute in float32, whatever the type of packed weights.

    Args:
        config: All settings.
        device: Where the model will run.
        dtype: What `resolve_dtype` chose.
        can_pack: Whether the model takes packed weights; those of transformers don't.

    Raises:
        ConfigError: Weights are to be quantized, and the device is no CPU, or the model doesn't
            take them.
    """
    wanted = config.model.quantization
    if not can_pack:
        if wanted not in ("auto", "none"):
            raise ConfigError(
                f"quantization is {wanted} (from {config.source_of('quantization')}), but the "
                f"model runs through transformers, whose weights are not packed; use "
                f"--quantization none.",
                field="quantization",
            )
        return WeightForm(dtype)
    if device.type != "cpu":
        if wanted not in ("auto", "none"):
            raise ConfigError(
                f"quantization is {wanted} (from {config.source_of('quantization')}), but weights "
                f"are quantized while they load for a CPU only, and the device is {device}; use "
                f"--quantization auto, or --device cpu.",
                field="quantization",
            )
        return WeightForm(dtype)
    if wanted == "none":
        return WeightForm(dtype, for_cpu_kernels=dtype == torch.float32)
    dense_dtype = None if config.model.dtype == "auto" else dtype
    return WeightForm(torch.float32, wanted, dense_dtype)


def resolve_kv_cache_dtype(wanted: str, is_packed: bool, dtype: torch.dtype) -> torch.dtype:
    """Choose the type of K and V, by the planner's rule.

    Args:
        wanted: ``auto``, or the name of a type.
        is_packed: Whether the weights are packed for the CPU kernels.
        dtype: Type of the activations.
    """
    name = str(dtype).removeprefix("torch.")
    return _DTYPES[memory_planner.resolve_kv_cache_dtype(wanted, name, is_packed)]


def use_cpu_threads(wanted: int | None, num_workers: int = 1) -> int:
    """Set the threads of torch and of our kernels: `wanted`, or as many as there are CPUs to use.

    Args:
        wanted: Threads of all workers together.
        num_workers: Among how many they are divided. Each has at least one.
    """
    usable = num_usable_cpus()
    if wanted is not None and wanted > usable:
        logger.warning(
            "cpu_threads is %d, but this process may use %d CPUs; more threads than CPUs make it "
            "slower",
            wanted,
            usable,
        )
    threads = min(max((wanted or usable) // num_workers, 1), MAX_THREADS)
    torch.set_num_threads(threads)
    set_num_threads(threads)
    return threads


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch on the calling thread: for many small operations, between which threads spin.

    On two cores with other work on them, the starter model loads in 2.4 to 5 s of which 1 s is
    work, and in 26 to 64 s with two threads, of which 8 to 14 s are spent.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
