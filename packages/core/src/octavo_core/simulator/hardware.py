"""From flags to what a replica is: its step times, its KV blocks and its longest request."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from octavo_core.config import EngineConfig, parse_quantity
from octavo_core.device_table import DeviceSpec, find_device
from octavo_core.errors import ConfigError
from octavo_core.host_memory import available_host_memory
from octavo_core.memory_planner import (
    DTYPE_BYTES,
    KV_DTYPE_BYTES,
    MemoryPlan,
    PlanSettings,
    format_bytes,
    plan_memory,
)
from octavo_core.plan_command import PlanSource, read_plan_source
from octavo_core.plan_report import why_not
from octavo_core.quantization import QUANTIZATIONS
from octavo_core.simulator.cost_model import CostModel, read_cost_model
from octavo_core.simulator.model_work import model_work
from octavo_core.simulator.roofline import roofline_cost_model
from octavo_core.simulator.sweep import parse_count

# Types of K and V that can be planned, and that no engine has.
PLANNED_KV_DTYPES = KV_DTYPE_BYTES.keys() - DTYPE_BYTES.keys()

ResolveModel = Callable[[EngineConfig], Path]


class Hardware(NamedTuple):
    """One replica's devices with a model on them."""

    cost_model: CostModel
    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0


def add_hardware_flags(group: Any) -> None:
    """Add the flags that `resolve_hardware` reads."""
    group.add_argument("--model", metavar="MODEL", help="folder, config.json or .gguf file")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="a GPU by name, whose data sheet says how fast it is (see octavo plan --help)",
    )
    group.add_argument("--device-memory", metavar="SIZE", help="its memory, such as 80GiB")
    group.add_argument("--cost-model", metavar="FILE", help="seconds of a step, as measured")
    group.add_argument(
        "--tensor-parallel-size", metavar="N", default="1", help="GPUs of a replica (default: 1)"
    )
    group.add_argument("--non-kv-memory", metavar="SIZE", help="all that is not KV cache, if known")
    group.add_argument(
        "--kv-cache-dtype",
        choices=["auto", *KV_DTYPE_BYTES],
        help="of K and V, also types that octavo serve does not have (default: auto)",
    )
    group.add_argument(
        "--quantization", choices=["none", *QUANTIZATIONS], metavar="METHOD", help="of the weights"
    )


def resolve_hardware(
    args: argparse.Namespace, config: EngineConfig, resolve_model: ResolveModel | None
) -> Hardware:
    """Choose a cost model and plan the KV cache.

    The cost model is measured (``--cost-model``) or follows from a data sheet (``--device``);
    the KV cache is planned for the device, or for this machine if none is named, unless
    ``--num-gpu-blocks-override`` says how many blocks there are.

    Args:
        args: With the flags of `add_hardware_flags`.
        config: Engine settings.
        resolve_model: Finds a model by more than its path.

    Raises:
        ConfigError: Too little is given, or the model does not fit.
        ModelError: The model can't be read.
    """
    if args.cost_model is None and args.device is None:
        raise ConfigError(
            "nothing says how fast a step is: give --device NAME for a GPU of the table, or "
            "--cost-model FILE, which octavo simulate --calibrate -o FILE makes on this machine.",
            field="cost_model",
        )
    num_blocks = config.cache.num_gpu_blocks_override
    if args.cost_model is not None and num_blocks is not None and args.model is None:
        # No model is needed then, nor known.
        asked = config.model.max_model_len
        longest = asked if isinstance(asked, int) else num_blocks * config.cache.block_size
        return Hardware(read_cost_model(args.cost_model), num_blocks, longest)
    source = _read_model(config, resolve_model)
    device = None if args.device is None else find_device(args.device)
    plan = plan_memory(source.spec, _plan_settings(args, config, device), source.gguf)
    if num_blocks is None:
        if not plan.fits:
            raise _does_not_fit(plan)
        # Layers with windows share one pool of smaller blocks; here a block has all layers.
        num_blocks = plan.kv_cache.kv_cache_tokens // config.cache.block_size
    if args.cost_model is not None:
        cost_model = read_cost_model(args.cost_model)
    else:
        assert device is not None
        cost_model = _estimate(source, plan, device)
    num_host_blocks = config.cache.swap_space // plan.kv_cache.block_bytes
    return Hardware(cost_model, num_blocks, plan.kv_cache.max_model_len, num_host_blocks)


def _read_model(config: EngineConfig, resolve_model: ResolveModel | None) -> PlanSource:
    name = config.model.model
    if resolve_model is not None:
        return read_plan_source(resolve_model(config), name or "the starter model")
    if not name:
        raise ConfigError("give --model: a folder, a config.json or a .gguf file.", field="model")
    return read_plan_source(Path(name).expanduser(), name)


def _plan_settings(
    args: argparse.Namespace, config: EngineConfig, device: DeviceSpec | None
) -> PlanSettings:
    sizes = {
        name: parse_quantity(name, value, f"flag --{name.replace('_', '-')}")
        for name in ("non_kv_memory", "device_memory")
        if (value := getattr(args, name)) is not None
    }
    memory = sizes.get("device_memory")
    if memory is None and device is not None:
        memory = device.memory_bytes
    return PlanSettings(
        device="this machine" if device is None else device.name,
        device_memory=available_host_memory() if memory is None else memory,
        is_host=memory is None,
        tensor_parallel_size=parse_count("tensor_parallel_size", args.tensor_parallel_size),
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        non_kv_memory=sizes.get("non_kv_memory"),
        kv_cache_memory=config.cache.kv_cache_memory,
        max_model_len=config.model.max_model_len,
        dtype=config.model.dtype,
        kv_cache_dtype=(
            args.kv_cache_dtype
            if args.kv_cache_dtype in PLANNED_KV_DTYPES
            else config.cache.kv_cache_dtype
        ),
        quantization=args.quantization,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        block_size=config.cache.block_size,
    )


def _estimate(source: PlanSource, plan: MemoryPlan, device: DeviceSpec) -> CostModel:
    tflops = device.bf16_tflops
    if plan.quantization == "fp8" and device.fp8_tflops is not None:
        tflops = device.fp8_tflops
    num_devices = plan.settings.tensor_parallel_size
    times = "" if num_devices == 1 else f"{num_devices} × "
    return roofline_cost_model(
        model_work(source.spec, plan),
        block_bytes=plan.kv_cache.block_bytes,
        bandwidth=device.bandwidth_gb_s * 1e9,
        flops=tflops * 1e12,
        source=f"{source.name} in {plan.dtype} on {times}{device.name}, from its data sheet",
    )


def _does_not_fit(plan: MemoryPlan) -> ConfigError:
    if not plan.has_kv_cache_memory:
        return ConfigError(why_not(plan), field="kv_cache_memory")
    return ConfigError(
        f"one request of max_model_len={plan.kv_cache.max_model_len} does not fit on "
        f"{plan.settings.device}: {format_bytes(max(plan.available_bytes, 0))} are left for the "
        f"KV cache; octavo plan with the same flags says what would fit.",
        field="max_model_len",
    )
