"""Pictures of a simulation. Needs matplotlib, which only this module imports, and late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo_core.errors import ConfigError
from octavo_core.simulator.report import Report


def plot_report(path: str | Path, report: Report) -> None:
    """Draw load over time and latencies as a PNG, SVG or PDF.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    figure = _figure((11, 7))
    axes = figure.subplots(2, 2)
    times = [interval.start for interval in report.timeline]
    for axis, name, title in (
        (axes[0][0], "output_tokens_per_second", "output tokens/s, all replicas"),
        (axes[1][0], "kv_cache_usage", "KV cache in use, share"),
    ):
        values = [getattr(interval, name) for interval in report.timeline]
        axis.step(times, values, where="post", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylim(bottom=0)
    for name, label in (("num_running", "running"), ("num_waiting", "waiting")):
        values = [getattr(interval, name) for interval in report.timeline]
        axes[0][1].step(times, values, where="post", linewidth=1, label=label)
    axes[0][1].set_title("requests of a replica", fontsize=10)
    axes[0][1].set_xlabel("seconds")
    axes[0][1].legend(fontsize=8)
    _draw_latencies(axes[1][1], report)
    _save(figure, path)


def plot_comparison(
    path: str | Path, fields: Sequence[str], reports: Sequence[tuple[Sequence[str], Report]]
) -> None:
    """Draw throughput, time to first token and inter-token latency by setting.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    figure = _figure((13, 4))
    axes = figure.subplots(1, 3)
    labels = [", ".join(values) for values, _ in reports]
    places = list(range(len(labels)))
    axes[0].bar(places, [report.output_tokens_per_second for _, report in reports])
    axes[0].set_title("output tokens/s", fontsize=10)
    for axis, name, title in ((axes[1], "ttft", "TTFT, s"), (axes[2], "itl", "ITL, s")):
        for share in ("p50", "p99"):
            values = [getattr(getattr(report, name), share) for _, report in reports]
            axis.plot(places, values, marker="o", label=share)
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log")
        axis.legend(fontsize=8)
    for axis in axes:
        axis.set_xticks(places, labels, rotation=30, ha="right", fontsize=8)
        axis.set_xlabel(", ".join(fields))
    _save(figure, path)


def check_plotting(path: str | Path) -> None:
    """Fail before the simulation, not after it.

    Raises:
        ConfigError: matplotlib is not installed, or it can't write such a file.
    """
    figure = _figure((1, 1))
    known = sorted(figure.canvas.get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in known:
        raise ConfigError(
            f"plot is {str(path)!r}; its name must end in one of {', '.join(known)}.", field="plot"
        )
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"plot is {str(path)!r}, and there is no such folder.", field="plot")


def _draw_latencies(axis: Any, report: Report) -> None:
    places = list(range(4))
    names = ("p50", "p90", "p99", "max")
    for field, label in (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e", "end to end")):
        latency = getattr(report, field)
        axis.plot(places, [getattr(latency, name) for name in names], marker="o", label=label)
    axis.set_xticks(places, names)
    axis.set_yscale("log")
    axis.set_title("latency, seconds", fontsize=10)
    axis.legend(fontsize=8)


def _figure(size: tuple[float, float]) -> Any:
    try:
        # A figure of its own: pyplot would look for a display.
        # Only those who ask for plots have it, so type checks must pass without.
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; "
            "run: pip install 'octavo-core[plot]'.",
            field="plot",
        ) from None
    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(
            f"plot {path} can't be written: {error.strerror}.", field="plot"
        ) from error
