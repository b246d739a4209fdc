"""One engine process after the other: what one owes when it crashes, the next one gets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, OctavoError
from octavo_server.engine_handle import EngineState
from octavo_server.engine_link import EngineLink
from octavo_server.engine_process import EngineProcess
from octavo_server.pending_calls import PendingCalls
from octavo_server.request_ledger import RequestLedger
from octavo_server.supervisor import Supervisor

logger = logging.getLogger(__name__)

# Seconds that an engine which has said its last word gets to end its workers.
_END_SECONDS = 2.0
# An engine that is put to sleep gets so many, as nobody waits for another one.
_SLEEP_SECONDS = 10.0
_POLL_SECONDS = 0.02
# An operator function waits for the step that runs; a long prefill takes its time.
CALL_SECONDS = 120.0
# What of `SchedulerStats` only grows. Each engine counts from 0, and a dashboard sees one server.
_TOTALS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "host_cache_hits")


class EngineKeeper:
    """An `EngineHandle` on an engine process of our own, which is replaced when it crashes.

    Args:
        process: The engine process, already spawned.
        supervisor: Starts another process when one has crashed, or was put to sleep.

    Attributes:
        on_outputs: Gets what each step brings, and an error for each request that is given up.
    """

    def __init__(self, process: EngineProcess, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.on_outputs: Callable[[list[wire.EngineCoreOutput]], None] = lambda outputs: None
        self.state = EngineState.STARTING
        self.stage = "starting the engine process"
        self.progress: float | None = None
        self._stats = wire.SchedulerStats()
        self._past_stats = wire.SchedulerStats()  # of engines that are gone
        self.limits: wire.Ready | None = None
        self._ledger = RequestLedger()
        self._calls = PendingCalls()
        self._config: EngineConfig | None = None
        self._closing = False
        self._recovery: asyncio.Task[None] | None = None
        self._falling_asleep = asyncio.Lock()
        # Set when a step's outputs came while a new engine tries the old one's requests.
        self._progressed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[wire.Ready] = loop.create_future()
        self._death: asyncio.Future[OctavoError] = loop.create_future()
        self._link = EngineLink(process, self._handle, self._on_engine_end)

    @property
    def stats(self) -> wire.SchedulerStats:
        """The engine's load after its last step; totals count the engines before it, too."""
        totals = {name: getattr(self._past_stats, name) for name in _TOTALS}
        return msgspec.structs.replace(
            self._stats,
            **{name: past + getattr(self._stats, name) for name, past in totals.items()},
        )

    @property
    def num_in_flight(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._ledger)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of prompts that have no answer's token yet."""
        return self._ledger.num_waiting_tokens

    @property
    def num_restarts(self) -> int:
        """How many engines were started in place of one that had crashed."""
        return self._supervisor.num_restarts

    def configure(self, config: EngineConfig) -> None:
        """Give the engine its configuration, now or as soon as it says hello."""
        self._config = config
        self._link.configure(config)

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Show what the front itself is doing, until the engine has something to tell."""
        if self.state is EngineState.STARTING:
            self.stage, self.progress = stage, progress

    async def wait_ready(self) -> wire.Ready:
        """Wait until the engine can take requests.

        Raises:
            OctavoError: Start-up failed; the class is the one that the engine named.
        """
        return await asyncio.shield(self._ready)

    async def wait_dead(self) -> OctavoError:
        """Wait until the engine has ended for good, and return why."""
        return await asyncio.shield(self._death)

    def add(self, requests: Sequence[wire.EngineCoreRequest]) -> None:
        """Start the choices of one API request. While an engine is replaced, they wait for it.

        Raises:
            EngineDeadError: The engine has ended, or has not started.
        """
        is_ready = self.state is EngineState.READY
        if not is_ready and self.state is not EngineState.RESTARTING:
            raise self._why_not()
        for request in requests:
            self._ledger.add(request, is_sent=is_ready)
            if is_ready:
                self._send(wire.AddRequest(request))

    def abort(self, engine_request_ids: Sequence[str]) -> None:
        """Forget requests, and tell the engine if it has them. Unknown ids are ignored."""
        known = [name for name in engine_request_ids if name in self._ledger]
        if not known:
            return
        self._ledger.remove(known)
        if self._link.is_ready:
            self._send(wire.AbortRequests(known))
        self._progressed.set()

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine's operator functions; see `EngineHandle.call`.

        Raises:
            EngineDeadError: The engine is not up.
            RequestFailedError: It refused, or did not answer in time.
        """
        if method == "sleep":
            return await self._sleep()
        if method == "wake_up":
            return await self._wake_up()
        if self.state is EngineState.ASLEEP:
            return None  # there is nothing left to forget
        if self.state is not EngineState.READY:
            raise self._why_not()
        return await self._calls.ask(
            lambda call_id: self._send(wire.UtilityCall(call_id, method, list(args))),
            method,
            CALL_SECONDS,
        )

    async def close(self, grace: float = 3.0) -> None:
        """End the engine: ask it, give it `grace` seconds while it is up, then kill it."""
        self._closing = True
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait({self._recovery})
        if self._link.is_ready:
            self._send(wire.Shutdown())
        elif self._link.process.process.is_alive():
            self._link.process.process.terminate()
        self._fail(EngineDeadError("the server is shutting down"))
        await self._link.close(grace)

    def _why_not(self) -> OctavoError:
        if self._death.done():
            return self._death.result()
        reasons = {
            EngineState.ASLEEP: "the engine sleeps",
            EngineState.RESTARTING: "the engine is being started again",
        }
        return EngineDeadError(reasons.get(self.state, "the engine has not started"))

    def _send(self, message: wire.ToEngine) -> None:
        self._link.send(message)

    def _handle(self, message: wire.ToFront) -> None:
        match message:
            case wire.EngineCoreOutputs(outputs, stats):
                self._stats = stats or self._stats
                self._ledger.note(outputs)
                self.on_outputs(outputs)
                self._progressed.set()
            case wire.Loading(stage, progress):
                self.stage, self.progress = stage, progress
            case wire.Ready():
                self._on_ready(message)
            case wire.UtilityResult(call_id, result, problem):
                self._calls.settle(call_id, result, problem)

    def _on_ready(self, ready: wire.Ready) -> None:
        if self._ready.done():
            self._recovery = asyncio.get_running_loop().create_task(self._resume())
            return
        self.limits = ready
        self._enter_ready()
        self._ready.set_result(ready)

    def _enter_ready(self) -> None:
        self.state = EngineState.READY
        self.stage, self.progress = "ready", 1.0

    # Sleep

    async def _sleep(self) -> None:
        """End the engine process; all memory that it has, on its device too, goes with it."""
        async with self._falling_asleep:
            await self._end_of_restart()
            if self.state is EngineState.ASLEEP:
                return
            if self.state is not EngineState.READY:
                raise self._why_not()
            self.state = EngineState.ASLEEP
            self.stage, self.progress = "asleep", None
            self._send(wire.Shutdown())
            self._forget_load()
            self._lose_all(EngineDeadError("the engine was put to sleep"))
            await self._link.close(_SLEEP_SECONDS)

    async def _wake_up(self) -> None:
        """Start another engine process, if there is none, and wait until it is ready."""
        async with self._falling_asleep:
            if self.state is EngineState.ASLEEP:
                self._start_another()
        await self._end_of_restart()
        if self.state is not EngineState.READY:
            raise self._why_not()

    async def _end_of_restart(self) -> None:
        while self.state is EngineState.RESTARTING:
            await asyncio.sleep(_POLL_SECONDS)

    # A crash, and what follows

    def _on_engine_end(self, error: OctavoError) -> None:
        """Start another engine if that makes sense, or give up."""
        if self._closing or self.state is EngineState.DEAD:
            return
        if self.state is EngineState.STARTING:
            self._fail(_with_stage(error, self.stage))
            return
        reason = self._supervisor.note_crash()
        if reason is not None:
            self._fail(EngineDeadError(f"{error}; {reason}"))
            return
        logger.error(
            "The engine has ended: %s. Starting another one for %d requests in flight",
            error,
            len(self._ledger),
        )
        self._calls.fail_all(EngineDeadError(f"{error}; another one is being started"))
        self._forget_load()
        self._start_another()
        self._quarantine(self._ledger.note_crash())

    def _start_another(self) -> None:
        self.state = EngineState.RESTARTING
        self.stage, self.progress = "starting another engine process", None
        if self._recovery is not None:
            self._recovery.cancel()
        self._recovery = asyncio.get_running_loop().create_task(self._replace_engine())

    async def _replace_engine(self) -> None:
        assert self._config is not None
        # The old one's memory has to be free before the new one looks how much there is. Tokens
        # that are still in its socket are computed again.
        await self._link.close(_END_SECONDS)
        try:
            process = self._supervisor.spawn()
            self._link = EngineLink(process, self._handle, self._on_engine_end)
        except (OSError, zmq.ZMQError) as error:
            self._fail(EngineDeadError(f"no other engine process can be started: {error}"))
            return
        self._link.configure(_with_limits(self._config, self._ready.result()))

    def _quarantine(self, engine_request_ids: list[str]) -> None:
        """Fail requests that were there at every crash."""
        for engine_request_id in engine_request_ids:
            logger.error("Request %s was in two crashes; it is failed", engine_request_id)
        self.on_outputs([_quarantined(request_id) for request_id in engine_request_ids])

    async def _resume(self) -> None:
        """Give the new engine all requests in flight: first one by one, then the rest.

        A request that makes the engine crash does so again when it comes to where it was, and
        then it is known who it was. Those tried before it go on meanwhile.
        """
        trials = self._ledger.trials()
        for number, trial in enumerate(trials):
            self.stage = "resuming the requests in flight"
            self.progress = number / len(trials)
            self._submit(self._ledger.unsent(trial))
            while not self._ledger.is_cleared(trial):
                self._progressed.clear()
                await self._progressed.wait()
        self._submit(self._ledger.unsent())
        self._enter_ready()
        logger.info("The new engine is ready and has %d requests in flight", len(self._ledger))

    def _forget_load(self) -> None:
        """Keep what an engine that is gone had counted, and nothing of its load."""
        totals = self.stats
        kept = {name: getattr(totals, name) for name in _TOTALS}
        self._past_stats, self._stats = wire.SchedulerStats(**kept), wire.SchedulerStats()

    def _submit(self, requests: list[wire.EngineCoreRequest]) -> None:
        for request in requests:
            self._send(wire.AddRequest(request))

    def _fail(self, error: OctavoError) -> None:
        """Enter the state DEAD, once, and end everything with the reason."""
        if self.state is EngineState.DEAD:
            return
        # A failed start is told by `wait_ready`, and needs to be said only once.
        is_news = self._ready.done() and not self._closing
        self.state = EngineState.DEAD
        self._forget_load()
        self.stage, self.progress = str(error), None
        self._death.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # Nobody may be waiting, which is no mistake.
        if is_news:
            logger.error("The engine has ended: %s", error)
        lost = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        self._lose_all(lost)

    def _lose_all(self, error: EngineDeadError) -> None:
        """Answer everything that the engine owes with an error."""
        self._calls.fail_all(error)
        owed = list(self._ledger)
        self._ledger.remove(owed)
        self.on_outputs([_lost(request_id, error) for request_id in owed])


def _with_stage(error: OctavoError, stage: str) -> OctavoError:
    """Say how far start-up was, where the engine itself could not."""
    return EngineDeadError(f"{error} while {stage}") if type(error) is EngineDeadError else error


def _with_limits(config: EngineConfig, ready: wire.Ready) -> EngineConfig:
    """Make another engine keep the limits that requests were let in by."""
    return config.replace(
        "the engine before",
        max_model_len=ready.max_model_len,
        num_gpu_blocks_override=ready.num_blocks or None,  # an encoder has none
    )


def _lost(engine_request_id: str, error: OctavoError) -> wire.EngineCoreOutput:
    return wire.EngineCoreOutput(
        engine_request_id, [], "error", error=str(error), error_kind="EngineDeadError"
    )


def _quarantined(engine_request_id: str) -> wire.EngineCoreOutput:
    return wire.EngineCoreOutput(
        engine_request_id,
        [],
        "error",
        error=(
            f"Request {engine_request_id} was in flight when the engine crashed, twice, and is not "
            f"tried again; the server's log has more."
        ),
        error_kind="RequestFailedError",
    )
