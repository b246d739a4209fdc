"""The ``simulate`` command: arguments in, tables, JSON and pictures out."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from octavo_core.config import EngineConfig, Option, options, resolve_config
from octavo_core.errors import ConfigError
from octavo_core.router import ROUTERS
from octavo_core.simulator.cost_model import CostModel, write_cost_model
from octavo_core.simulator.generate import TraceShape, generate_trace
from octavo_core.simulator.hardware import (
    PLANNED_KV_DTYPES,
    ResolveModel,
    add_hardware_flags,
    resolve_hardware,
)
from octavo_core.simulator.report import Report, format_comparison, format_report
from octavo_core.simulator.simulation import Deployment, simulate
from octavo_core.simulator.sweep import SweepAxis, combinations, parse_count, parse_sweep
from octavo_core.simulator.trace import TraceEntry, read_trace, write_trace

Calibrate = Callable[[EngineConfig, Callable[[str], None]], CostModel]
Setting = Mapping[str, str]

_SHAPE_FLAGS = {
    "rate": (float, "requests a second (default: all at once)"),
    "prompt_tokens": (int, "mean prompt, without what is shared"),
    "output_tokens": (int, "mean answer"),
    "length_spread": (float, "standard deviation of both, as a share of the mean"),
    "shared_prefix": (int, "tokens in front of each prompt that its group shares"),
    "num_prefix_groups": (int, "groups that share"),
    "prefix_skew": (float, "exponent of Zipf's law for the groups' popularity"),
}
_SHAPE_DEFAULTS = {
    field.name: field.default for field in msgspec.structs.fields(TraceShape) if not field.required
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        nargs="?",
        help='JSON lines such as {"time": 0.5, "prompt_tokens": 512, "output_tokens": 128}',
    )
    _add_trace_flags(parser.add_argument_group("trace", "Draw a trace in place of reading one."))
    _add_device_flags(parser.add_argument_group("device", "What computes the steps."))
    _add_fleet_flags(parser.add_argument_group("replicas", "Several engines behind a router."))
    _add_output_flags(parser.add_argument_group("output"))
    group = parser.add_argument_group(
        "engine", "As of octavo serve; environment variables such as OCTAVO_MAX_NUM_SEQS count too."
    )
    for option in _engine_options():
        if option.name == "kv_cache_dtype":
            continue  # one of the device's flags, which takes more types
        flag = "--" + option.name.replace("_", "-")
        text = f"{option.description} (default: {option.default})".replace("%", "%%")
        if isinstance(option.default, bool):
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, dest=option.name, action=action, default=None, help=text)
        else:
            group.add_argument(flag, dest=option.name, metavar="VALUE", help=text)


def run(
    args: argparse.Namespace,
    resolve_model: ResolveModel | None = None,
    calibrate: Calibrate | None = None,
) -> int:
    """Run the command.

    Args:
        args: Parsed flags of `add_arguments`.
        resolve_model: Finds a model's folder or file by more than its path.
        calibrate: Measures this machine; None says which package can.

    Returns:
        0; every mistake is raised.

    Raises:
        ConfigError: A flag, or two together, can't work.
        ModelError: The model can't be read.
        TraceError: The trace can't be read or written.
    """
    config = _resolve_config(args)
    if args.calibrate:
        return _run_calibration(args, config, calibrate)
    if args.output is not None:
        return _write_generated(args)
    axes = [parse_sweep(text) for text in args.sweep]
    settings = combinations(axes)
    _check_trace(args)
    if args.plot is not None:
        # matplotlib takes half a second to import.
        from octavo_core.simulator.plot import check_plotting

        check_plotting(args.plot)
    deployments = [_deployment(args, config, setting, resolve_model) for setting in settings]
    reports = []
    for deployment, setting in zip(deployments, settings, strict=True):
        reports.append(_simulate(args, deployment, setting))
    _show(args, axes, settings, reports, deployments[0])
    return 0


# Flags


def _add_trace_flags(group: Any) -> None:
    group.add_argument("--generate", metavar="N", help="requests to draw")
    for name, (kind, text) in _SHAPE_FLAGS.items():
        default = _SHAPE_DEFAULTS.get(name)
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            metavar="N",
            help=text + ("" if default is None else f" (default: {default})"),
        )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn")


def _add_device_flags(group: Any) -> None:
    add_hardware_flags(group)
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine with the model, and write a cost model to --output",
    )


def _add_fleet_flags(group: Any) -> None:
    group.add_argument("--replicas", metavar="N", help="engines (default: 1)")
    group.add_argument("--router", choices=ROUTERS, help="default: least_loaded")
    group.add_argument(
        "--router-key-tokens",
        type=int,
        default=128,
        metavar="N",
        help="prompt tokens that prefix_affinity looks at (default: 128)",
    )
    group.add_argument(
        "--router-load-factor",
        type=float,
        default=1.25,
        metavar="X",
        help="prefix_affinity gives no replica more than X times the mean (default: 1.25)",
    )


def _add_output_flags(group: Any) -> None:
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="FIELD=A,B,C",
        help="compare values of a setting in one table; repeat it for every combination",
    )
    group.add_argument("--json", action="store_true", help="print the report as JSON")
    group.add_argument("--plot", metavar="FILE", help="draw it (needs octavo-core[plot])")
    group.add_argument(
        "-o", "--output", metavar="FILE", help="where --generate or --calibrate writes"
    )


def _engine_options() -> Iterator[Option]:
    for option in options():
        if option.group in ("scheduler", "cache") or option.name in ("max_model_len", "dtype"):
            yield option


# Phases


def _resolve_config(args: argparse.Namespace) -> EngineConfig:
    flags = {option.name: getattr(args, option.name) for option in _engine_options()}
    if flags["kv_cache_dtype"] in PLANNED_KV_DTYPES:
        flags["kv_cache_dtype"] = None
    return resolve_config({**flags, "model": args.model}, os.environ)


def _run_calibration(
    args: argparse.Namespace, config: EngineConfig, calibrate: Calibrate | None
) -> int:
    if calibrate is None:
        raise ConfigError(
            "--calibrate runs the model, which takes octavo-server: use octavo simulate.",
            field="calibrate",
        )
    if args.output is None:
        raise ConfigError(
            "--calibrate needs a file for what it finds, such as -o cost.json.", field="output"
        )
    model = calibrate(config, lambda text: print(text, file=sys.stderr, flush=True))
    write_cost_model(args.output, model)
    error = model.median_error or 0.0
    print(f"{args.output}: {model.source}; half of the measured steps are within {error:.1%}")
    return 0


def _write_generated(args: argparse.Namespace) -> int:
    if args.generate is None or args.trace is not None:
        raise ConfigError(
            "--output is for --generate or --calibrate; the report goes to standard output.",
            field="output",
        )
    count = write_trace(args.output, generate_trace(_shape(args)))
    print(f"{args.output}: {count:,} requests")
    return 0


def _check_trace(args: argparse.Namespace) -> None:
    if (args.trace is None) == (args.generate is None):
        raise ConfigError("give one of TRACE and --generate N.", field="trace")
    if args.trace is None:
        _shape(args)
        return
    for name in _SHAPE_FLAGS:
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} shapes a trace that is drawn: it needs --generate.",
                field=name,
            )


def _shape(args: argparse.Namespace) -> TraceShape:
    given = {name: getattr(args, name) for name in _SHAPE_FLAGS}
    fields = {name: value for name, value in given.items() if value is not None}
    fields.setdefault("rate", float("inf"))
    return TraceShape(num_requests=parse_count("generate", args.generate), seed=args.seed, **fields)


def _trace(args: argparse.Namespace) -> Iterator[TraceEntry]:
    return generate_trace(_shape(args)) if args.trace is None else read_trace(args.trace)


def _deployment(
    args: argparse.Namespace,
    config: EngineConfig,
    setting: Setting,
    resolve_model: ResolveModel | None,
) -> Deployment:
    fields = {"replicas": args.replicas or 1, "router": args.router or "least_loaded", **setting}
    replicas, router = parse_count("replicas", fields.pop("replicas")), fields.pop("router")
    config = config.replace("--sweep", **{name: fields[name] for name in fields})
    hardware = resolve_hardware(args, config, resolve_model)
    return Deployment(
        cost_model=hardware.cost_model,
        num_blocks=hardware.num_blocks,
        max_model_len=hardware.max_model_len,
        num_host_blocks=hardware.num_host_blocks,
        config=config,
        num_replicas=replicas,
        router=str(router),
        router_key_tokens=args.router_key_tokens,
        router_load_factor=args.router_load_factor,
        seed=args.seed,
    )


def _simulate(args: argparse.Namespace, deployment: Deployment, setting: Setting) -> Report:
    start = time.perf_counter()
    with _without_garbage_collection():
        report = simulate(_trace(args), deployment)
    seconds = time.perf_counter() - start
    what = " ".join(f"{name}={value}" for name, value in setting.items())
    # Not part of the report: equal simulations print equal reports.
    print(
        f"simulated {report.num_requests:,} requests in {seconds:.1f} s "
        f"({report.num_requests / seconds:,.0f} a second){' ' if what else ''}{what}",
        file=sys.stderr,
        flush=True,
    )
    return report


def _show(
    args: argparse.Namespace,
    axes: Sequence[SweepAxis],
    settings: Sequence[Setting],
    reports: Sequence[Report],
    deployment: Deployment,
) -> None:
    fields = [axis.field for axis in axes]
    compared = [
        (tuple(setting.values()), report) for setting, report in zip(settings, reports, strict=True)
    ]
    if args.json:
        result: Any = reports[0]
        if axes:
            result = [
                {"setting": setting, "report": report}
                for setting, report in zip(settings, reports, strict=True)
            ]
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    elif axes:
        print(format_comparison(fields, compared))
    else:
        print(_describe(deployment))
        print(format_report(reports[0]))
    if args.plot is None:
        return
    from octavo_core.simulator.plot import plot_comparison, plot_report

    if axes:
        plot_comparison(args.plot, fields, compared)
    else:
        plot_report(args.plot, reports[0])


def _describe(deployment: Deployment) -> str:
    tokens = deployment.num_blocks * deployment.config.cache.block_size
    return (
        f"{deployment.cost_model.source or 'cost model'}; {deployment.num_blocks:,} blocks "
        f"({tokens:,} tokens), max_model_len {deployment.max_model_len:,}\n"
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nothing here is cyclic, and looking for cycles among all token lists takes 10 % longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
