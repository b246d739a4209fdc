"""How well the simulator predicts this machine: calibrate, run for real, simulate, compare.

    nox -s bench -- simulator
    nox -s bench -- simulator --requests 60 --limit 20 -- path/to/model
    nox -s bench -- simulator --clock cpu

The starter model runs at three loads (shares of what the cost model says it can do; 2 is
an overload) in this process, its requests arriving in real time. The same trace is then
simulated. Calibration and real runs take turns, and each real run is compared with what
was measured right before and right after it, so that a machine that gets slower gets
slower for both.

On a machine that others use too, ``--clock cpu`` measures calibration and real runs in
this process's CPU time, on one thread: time that others took away does not pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

from octavo_core.config import EngineConfig, resolve_config
from octavo_core.sampling_params import SamplingParams
from octavo_core.simulator.calibration import Observation, fit_cost_model
from octavo_core.simulator.cost_model import CostModel, read_cost_model, write_cost_model
from octavo_core.simulator.generate import TraceShape, generate_trace
from octavo_core.simulator.report import Report, format_seconds
from octavo_core.simulator.simulation import Deployment, simulate
from octavo_core.simulator.trace import PromptMaker, TraceEntry
from octavo_core.wire import EngineCoreRequest
from octavo_server.calibration import CalibrationRun, Calibrator, start_engine

LOADS = (0.3, 0.6, 2.0)


@dataclass
class Measured:
    """What a run, real or simulated, came to."""

    requests_per_second: float
    output_tokens_per_second: float
    mean_ttft: float
    mean_itl: float


class WallClock:
    """Seconds as they pass for everybody."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class CpuClock:
    """Seconds that this process computed, and those that it had nothing to do."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> float:
        return time.process_time() + self._skipped

    def wait_until(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self.now())


def main() -> int:
    arguments = parse_arguments()
    clock = CpuClock() if arguments.clock == "cpu" else WallClock()
    settings = {"model": arguments.model or None, "max_model_len": 2048}
    if arguments.clock == "cpu":
        settings["cpu_threads"] = 1
    run = start_engine(resolve_config(keywords=settings))
    try:
        results = measure(run, clock, arguments)
    finally:
        run.engine.shutdown()
    if arguments.json:
        print(json.dumps(results))
    worst = max(abs(result[name]["error"]) for result in results for name in ("rps", "ttft"))
    verdict = "within" if worst <= arguments.limit / 100 else "OVER"
    print(
        f"largest error of throughput and mean TTFT: {worst:.1%}, {verdict} the limit of "
        f"{arguments.limit:g} %",
        file=sys.stderr,
    )
    return 0 if worst <= arguments.limit / 100 else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=30, help="at each load (default: 30)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="mean prompt (default: 64)")
    parser.add_argument("--output-tokens", type=int, default=24, help="mean answer (default: 24)")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="shares of capacity")
    parser.add_argument("--limit", type=float, default=20.0, help="per cent allowed (default: 20)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--cost-model", help="use this one, and do not calibrate")
    parser.add_argument("--save", help="write the cost model here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("model", nargs="?", default="", help="default: the starter model")
    return parser.parse_args()


def measure(
    run: CalibrationRun, clock: WallClock | CpuClock, arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Take turns between calibration and real runs, and compare."""
    calibrator = Calibrator(run, clock=clock.now)
    rounds: list[list[Observation]] = []

    def calibrate() -> CostModel:
        """Measure a round more; fit it together with the one before it."""
        if arguments.cost_model:
            return read_cost_model(arguments.cost_model)
        start = time.perf_counter()
        calibrator.measure_round()
        rounds.append(calibrator.observations[sum(map(len, rounds)) :])
        model = fit_cost_model([each for measured in rounds[-2:] for each in measured])
        print(
            f"calibrated in {time.perf_counter() - start:.0f} s, median error "
            f"{model.median_error:.1%}, one request alone {format_seconds(alone(model))}",
            file=sys.stderr,
            flush=True,
        )
        return model

    def alone(model: CostModel) -> float:
        shape = shape_of(arguments, float("inf"), 0, 1)
        return simulate(generate_trace(shape), deployment(run, model)).e2e.mean

    model = calibrate()
    burst = shape_of(arguments, float("inf"), 0, 4 * arguments.requests)
    capacity = simulate(generate_trace(burst), deployment(run, model)).requests_per_second
    print(f"capacity {capacity:.2f} requests/s", file=sys.stderr, flush=True)
    real = []
    for index, load in enumerate(arguments.loads):
        trace = list(generate_trace(shape_of(arguments, load * capacity, index + 1)))
        measured = run_real(run, trace, clock, index * arguments.requests)
        real.append((load, trace, measured, calibrate()))
    if arguments.save:
        write_cost_model(arguments.save, model if arguments.cost_model else calibrator.fit())
    results = []
    print(f"{'load':>5} {'':<12}{'real':>10}{'simulated':>12}{'error':>9}")
    for load, trace, measured, model in real:
        predicted = of_report(simulate(trace, deployment(run, model)))
        row = {"load": load, **compare(measured, predicted)}
        results.append(row)
        for name, title in (
            ("rps", "requests/s"),
            ("tps", "output tok/s"),
            ("ttft", "mean TTFT"),
            ("itl", "mean ITL"),
        ):
            show = format_seconds if name in ("ttft", "itl") else "{:.2f}".format
            pair = row[name]
            print(
                f"{load:>5g} {title:<12}{show(pair['real']):>10}{show(pair['simulated']):>12}"
                f"{pair['error']:>+9.1%}"
            )
    return results


def shape_of(
    arguments: argparse.Namespace, rate: float, seed: int, num_requests: int | None = None
) -> TraceShape:
    return TraceShape(
        num_requests=num_requests or arguments.requests,
        rate=rate,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        max_tokens=512,
        seed=seed,
    )


def deployment(run: CalibrationRun, model: CostModel) -> Deployment:
    config: EngineConfig = run.engine.config
    return Deployment(
        cost_model=model,
        num_blocks=run.ready.num_blocks,
        max_model_len=run.ready.max_model_len,
        config=config,
    )


def run_real(
    run: CalibrationRun, trace: list[TraceEntry], clock: WallClock | CpuClock, first_id: int
) -> Measured:
    """Run a trace through the engine, requests arriving when they should.

    Args:
        first_id: Keeps prompts apart from those of earlier runs, which the engine still has
            in its prefix cache.
    """
    engine, prompts = run.engine, PromptMaker()
    requests = []
    for index, entry in enumerate(trace):
        prompt = prompts.make(entry, first_id + index)
        token_ids = [token % run.spec.vocab_size for token in prompt]
        params = SamplingParams(
            max_tokens=entry.output_tokens, temperature=0.0, ignore_eos=True, seed=0
        )
        requests.append(EngineCoreRequest(str(index), token_ids, params))
    arrivals = {
        request.request_id: entry.time for request, entry in zip(requests, trace, strict=True)
    }
    ttfts, gaps, last = [], [], {}
    waiting = list(zip([entry.time for entry in trace], requests, strict=True))[::-1]
    start = clock.now()
    now = 0.0
    while waiting or engine.has_unfinished_requests():
        now = clock.now() - start
        while waiting and waiting[-1][0] <= now:
            engine.add_request(waiting.pop()[1])
        if not engine.has_unfinished_requests():
            clock.wait_until(start + waiting[-1][0])
            continue
        outputs = engine.step().outputs
        now = clock.now() - start
        for output in outputs:
            name = output.request_id
            if not output.new_token_ids:
                continue
            if name in last:
                gaps.append(now - last[name])
            else:
                ttfts.append(now - arrivals[name])
            last[name] = now
    return Measured(
        len(trace) / now,
        (len(ttfts) + len(gaps)) / now,
        statistics.mean(ttfts),
        statistics.mean(gaps),
    )


def of_report(report: Report) -> Measured:
    return Measured(
        report.requests_per_second,
        report.output_tokens_per_second,
        report.ttft.mean,
        report.itl.mean,
    )


def compare(real: Measured, simulated: Measured) -> dict[str, dict[str, float]]:
    pairs = {
        "rps": (real.requests_per_second, simulated.requests_per_second),
        "tps": (real.output_tokens_per_second, simulated.output_tokens_per_second),
        "ttft": (real.mean_ttft, simulated.mean_ttft),
        "itl": (real.mean_itl, simulated.mean_itl),
    }
    return {
        name: {"real": first, "simulated": second, "error": second / first - 1}
        for name, (first, second) in pairs.items()
    }


if __name__ == "__main__":
    sys.exit(main())
