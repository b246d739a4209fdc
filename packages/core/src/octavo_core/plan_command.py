"""The ``plan`` command: what fits on a device, before anything is downloaded.

Exit codes: 0 it fits, 1 it does not, 2 a mistake in the arguments or the model's files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

from octavo_core.config import parse_quantity, resolve_config
from octavo_core.device_table import DEVICES, find_device
from octavo_core.errors import ConfigError
from octavo_core.fit_advice import advise
from octavo_core.gguf import GGUFHeader, read_gguf_header
from octavo_core.host_memory import available_host_memory
from octavo_core.memory_planner import (
    DTYPE_BYTES,
    KV_DTYPE_BYTES,
    MemoryPlan,
    PlanSettings,
    format_bytes,
    plan_memory,
)
from octavo_core.model_spec import (
    ModelSpec,
    read_json,
    read_model_spec,
    spec_from_config,
    spec_from_gguf,
)
from octavo_core.plan_report import PlannedModel, report_json, report_table
from octavo_core.quantization import QUANTIZATIONS
from octavo_core.weight_estimate import estimate_weights

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1

# Flags that are settings of an engine too; the configuration knows their limits.
_ENGINE_FLAGS = (
    "block_size",
    "dtype",
    "gpu_memory_utilization",
    "kv_cache_memory",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
)
# Ends of the names of classes that predict a next token.
_WRITES_TEXT = ("CausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")
_EPILOG = (
    "Nothing is loaded, and the device need not be here. Weights and activations are estimated "
    "from shapes; --non-kv-memory takes a measured sum in their place. Exit code: 0 if one "
    "request of --max-model-len fits, 1 if it does not, 2 for a mistake in the arguments. "
    "Devices: " + ", ".join(DEVICES) + "."
)


class PlanSource(NamedTuple):
    """What a model was read from.

    Attributes:
        name: What to call it.
        spec: Its hyper-parameters.
        gguf: Its header, if it is a GGUF file.
    """

    name: str
    spec: ModelSpec
    gguf: GGUFHeader | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the flags of ``plan``."""
    parser.add_argument("model", metavar="MODEL", help="folder, config.json or .gguf file")
    add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags alone, for a command that takes other kinds of MODEL."""
    parser.epilog = _EPILOG
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--device", metavar="NAME", help="device by name (default: this machine's memory)"
    )
    device.add_argument("--device-memory", metavar="SIZE", help="device by size, such as 80GiB")
    for flag, text in (
        ("--tensor-parallel-size", "devices that share each layer (default: 1)"),
        ("--pipeline-parallel-size", "devices that follow each other (default: 1)"),
        ("--gpu-memory-utilization", "share of the device to use (default: 0.92)"),
        ("--max-model-len", "most tokens of a request, or auto for what fits (default: all)"),
        ("--max-num-seqs", "most requests that run at once (default: 128)"),
        ("--max-num-batched-tokens", "token budget of a step (default: 2048)"),
        ("--block-size", "tokens in a KV block (default: 16)"),
    ):
        parser.add_argument(flag, metavar="N", help=text)
    parser.add_argument(
        "--non-kv-memory", metavar="SIZE", help="all that is not KV cache on a device, if known"
    )
    parser.add_argument("--kv-cache-memory", metavar="SIZE", help="KV cache, not what is left")
    parser.add_argument("--dtype", choices=["auto", *DTYPE_BYTES], help="type of the weights")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", *KV_DTYPE_BYTES],
        default="auto",
        help="type of K and V",
    )
    parser.add_argument(
        "--quantization",
        metavar="METHOD",
        help="store linear layers so: none, " + ", ".join(QUANTIZATIONS),
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Read the model, plan, and print the plan.

    Returns:
        0 if it fits, 1 if it does not.

    Raises:
        UserError: An argument or one of the model's files is wrong.
    """
    return run_plan(args, read_plan_source(Path(args.model).expanduser(), args.model))


def run_plan(args: argparse.Namespace, source: PlanSource) -> int:
    """Plan a model that was read, and print the plan; see `run`."""
    settings = settings_from(args)
    plan = plan_memory(source.spec, settings, source.gguf)
    planned = PlannedModel(
        name=source.name,
        spec=source.spec,
        plan=plan,
        advice=advise(source.spec, settings, source.gguf),
        notes=_notes(source, plan),
    )
    print(report_json(planned) if args.json else report_table(planned, ascii_only=_ascii_only()))
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def read_plan_source(path: Path, name: str) -> PlanSource:
    """Read a model's hyper-parameters; of a folder, config.json alone has to be there.

    Raises:
        ModelError: The file is missing or damaged, or misses an entry.
    """
    if path.suffix == ".json":
        return PlanSource(name, spec_from_config(read_json(path)))
    if path.is_dir():
        return PlanSource(name, read_model_spec(path))
    header = read_gguf_header(path, with_vocabulary=False)
    return PlanSource(name, spec_from_gguf(header), header)


def settings_from(args: argparse.Namespace) -> PlanSettings:
    """Turn parsed flags into settings.

    Raises:
        ConfigError: Names the flag, its value and the limit.
    """
    config = resolve_config({name: getattr(args, name) for name in _ENGINE_FLAGS})
    sizes = {
        name: parse_quantity(name, value, f"flag --{name.replace('_', '-')}")
        for name in ("non_kv_memory", "device_memory")
        if (value := getattr(args, name)) is not None
    }
    quantization = args.quantization
    if quantization is not None:
        quantization = quantization.lower()
        if quantization not in ("none", *QUANTIZATIONS):
            raise ConfigError(
                f"quantization is {args.quantization!r}; known: none, {', '.join(QUANTIZATIONS)}.",
                field="quantization",
            )
    return PlanSettings(
        **_device(args, sizes.get("device_memory")),
        tensor_parallel_size=_positive(args, "tensor_parallel_size"),
        pipeline_parallel_size=_positive(args, "pipeline_parallel_size"),
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        non_kv_memory=sizes.get("non_kv_memory"),
        kv_cache_memory=config.cache.kv_cache_memory,
        max_model_len=config.model.max_model_len,
        dtype=config.model.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=quantization,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        block_size=config.cache.block_size,
    )


def _device(args: argparse.Namespace, size: int | None) -> dict[str, Any]:
    if size is not None:
        if size < 1:
            raise ConfigError("device_memory must be positive.", field="device_memory")
        return {"device": format_bytes(size), "device_memory": size}
    if args.device is not None and args.device.lower() != "cpu":
        found = find_device(args.device)
        return {"device": found.name, "device_memory": found.memory_bytes}
    # A share of the memory is a GPU's rule; asking for one here asks for that rule.
    is_host = args.gpu_memory_utilization is None
    return {
        "device": "this machine's free memory",
        "device_memory": available_host_memory(),
        "is_host": is_host,
    }


def _positive(args: argparse.Namespace, name: str) -> int:
    text = getattr(args, name)
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{name} is {text!r} (from flag --{name.replace('_', '-')}): it must be a whole "
            f"number of at least 1.",
            field=name,
        )
    return int(text)


def _notes(source: PlanSource, plan: MemoryPlan) -> list[str]:
    spec, notes = source.spec, []
    if plan.settings.is_host:
        notes.append(
            "No device was named, so this is what a server on this machine's CPU would do: the KV "
            "cache gets the smaller of 4 GiB and half of what is free beside the weights."
        )
    if plan.weights_source == "file" and not plan.settings.is_host:
        plain = estimate_weights(spec, DTYPE_BYTES[plan.dtype])
        unpacked = plain.stage_bytes(range(spec.num_hidden_layers))
        notes.append(
            f"The weights are counted as the file packs them, which CPUs keep; a GPU gets them "
            f"unpacked to {plan.dtype}, and they take {format_bytes(unpacked)} in all there."
        )
    method = spec.quantization
    if method is not None and method.weight_bytes is None and plan.settings.quantization is None:
        notes.append(
            f"Quantization {method.method!r} is not known here, so weights are counted as "
            f"{plan.weights_dtype}; --quantization names one that is."
        )
    # A Llama's file may leave out its type.
    if spec.family.is_guess and (spec.model_type or spec.architecture != "LlamaForCausalLM"):
        what = "activations" if plan.weights_source == "file" else "weights, activations"
        notes.append(
            f"How {spec.model_type or spec.architecture} models are built is not known here: "
            f"{what} and KV cache are those of a Llama of these sizes, a guess."
        )
    if _may_only_encode(source):
        notes.append(
            f"{spec.architecture} does not look like a model that writes text; one that only "
            f"encodes keeps no KV cache."
        )
    if spec.architecture.endswith("ForConditionalGeneration"):
        notes.append("Only the language model is counted, without encoders of images or sound.")
    if any(layer.kind == "none" for layer in spec.layers):
        notes.append(
            "Some layers keep no K and V of their own; what else they keep is not counted."
        )
    return notes


def _may_only_encode(source: PlanSource) -> bool:
    """True unless the name of the class, or the GGUF file, says that tokens follow tokens."""
    architecture = source.spec.architecture
    if source.gguf is not None:
        # GGUF's names are of families, not of classes.
        name = source.gguf.metadata.get("general.architecture")
        return source.gguf.metadata.get(f"{name}.attention.causal") is False
    return not architecture.endswith(_WRITES_TEXT)


def _ascii_only() -> bool:
    """True if standard output can't show what the bar is drawn with."""
    try:
        "█▓▒·×".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return True
    return False
