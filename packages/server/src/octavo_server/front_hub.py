"""The middle between one engine and several fronts: ``--api-server-count``.

The hub lives in the main process, which serves no HTTP. It owns the engine's keeper, and so
the list of what the engine owes: an engine that crashes is replaced as it is with one front,
and the fronts see a pause. Of a step it passes on to each front what is for it (2 µs a token).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, OctavoError, error_named
from octavo_server import front_wire
from octavo_server.engine_client import check_room
from octavo_server.engine_handle import EngineHandle, EngineState
from octavo_server.front_wire import FromHub, ToHub
from octavo_server.http_counts import HTTPCounts
from octavo_server.metrics import ServingMetrics
from octavo_server.metrics_report import MetricsReport, add_report, report_of, sum_reports
from octavo_server.pending_calls import PendingCalls

logger = logging.getLogger(__name__)

# Seconds between two looks at where the engine is.
_STATUS_INTERVAL = 0.05
# A front that does not answer in so many seconds is left out.
_CALL_SECONDS = 2.0
_UNAVAILABLE = 503


class FrontHub:
    """Passes requests and answers between the fronts and the engine.

    All methods belong to one event loop. A front is known by its index, from 0 on; one that has
    crashed and was started again has the same.

    Args:
        address: ZMQ address to bind.
        engine: What computes the requests.
        config: All settings, with those that are secret.

    Attributes:
        metrics: What the fronts have counted, as of their last report.
        on_sign_of_life: Told of each message of a front.
        on_ready: Told when a front takes requests.
        on_failure: Told when a front can't start, and why.
    """

    def __init__(self, address: str, engine: EngineHandle, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._model: front_wire.ModelFound | None = None
        self.on_sign_of_life: Callable[[int], None] = lambda index: None
        self.on_ready: Callable[[int, front_wire.FrontReady], None] = lambda index, ready: None
        self.on_failure: Callable[[int, OctavoError], None] = lambda index, error: None
        # Of the fronts that are there, by index, and the other way round.
        self._identities: dict[int, bytes] = {}
        self._indices: dict[bytes, int] = {}
        # Engine requests in flight, and the front that each belongs to.
        self._owners: dict[str, int] = {}
        self._sleep_level: int | None = None
        self._is_serving = False
        self._num_drains = 0
        self._calls = PendingCalls()
        self._tasks: set[asyncio.Task[None]] = set()
        # What fronts that are gone have counted, and the hub itself.
        self._past = MetricsReport()
        self._own = ServingMetrics()
        self._reports: dict[int, MetricsReport] = {}
        self._status: front_wire.EngineStatus | None = None
        self._last_words: wire.Failed | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A ROUTER drops what doesn't fit; requests are bounded by number instead.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(address)
        engine.on_outputs = self._deliver
        self._start(self._read())
        self._start(self._watch_engine())

    # For `octavo_server.stats_log`

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._engine.state

    @property
    def stats(self) -> wire.SchedulerStats:
        """The engine's load after its last step."""
        return self._engine.stats

    @property
    def metrics(self) -> ServingMetrics:
        """What all fronts have counted, as of a second ago."""
        metrics = ServingMetrics()
        add_report(metrics, HTTPCounts(), self._totals())
        return metrics

    @property
    def is_engine_dead(self) -> bool:
        """True once the engine has ended for good."""
        return self._engine.state is EngineState.DEAD

    @property
    def num_in_flight(self) -> int:
        """Answers that the engine owes."""
        return len(self._owners)

    def configure(self, config: EngineConfig, model_name: str) -> None:
        """Tell the engine and the fronts, now or when they say hello, which model was found."""
        self._engine.configure(config.without_secrets())
        self._model = front_wire.ModelFound(config.model_path, model_name)
        self._broadcast(self._model)

    def drain(self) -> None:
        """Have the fronts take nothing new and end; the second time, end at once."""
        self._num_drains += 1  # for fronts that are still being started
        self._broadcast(front_wire.Drain())

    def lose_front(self, index: int) -> None:
        """Forget a front whose process has ended: its requests, but not what it has counted."""
        self._indices.pop(self._identities.pop(index, b""), None)
        lost = [name for name, owner in self._owners.items() if owner == index]
        for name in lost:
            del self._owners[name]
        self._engine.abort(lost)
        report = self._reports.pop(index, None)
        self._broadcast(front_wire.FrontLost(index))
        if report is not None:
            self._past = sum_reports([self._past, report])

    def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    # What fronts say

    async def _read(self) -> None:
        while True:
            identity, frame = await self._socket.recv_multipart()
            try:
                self._handle(identity, front_wire.decode_to_hub(frame))
            except Exception:
                logger.exception("A front's message could not be handled")

    def _handle(self, identity: bytes, message: ToHub) -> None:
        if isinstance(message, front_wire.FrontHello):
            self._identities[message.index] = identity
            self._indices[identity] = message.index
            self._welcome(message.index)
            return
        index = self._indices.get(identity)
        if index is None:
            return  # the last words of a front that is gone
        self.on_sign_of_life(index)
        match message:
            case front_wire.AddRequests(requests):
                self._add(index, requests)
            case wire.AbortRequests(request_ids):
                for name in request_ids:
                    self._owners.pop(name, None)
                self._engine.abort(request_ids)
            case front_wire.Report(report):
                self._reports[index] = report
            case front_wire.FrontAnswer(call_id, result):
                self._calls.settle(call_id, result)
            case front_wire.FrontReady():
                self._is_serving = True
                self.on_ready(index, message)
            case wire.Failed(text, kind, field):
                self.on_failure(index, error_named(kind, text, field, default=EngineDeadError))
            case wire.UtilityCall(call_id, method, args):
                self._start(self._call_engine(index, call_id, method, args))
            case front_wire.CallFronts(call_id, method, args):
                self._start(self._call_fronts_for(index, call_id, method, args))
            case front_wire.CollectMetrics(call_id):
                self._start(self._collect(index, call_id))
            case front_wire.PeerRequest() | front_wire.PeerLeft():
                self._pass_to_peer(message)
            case front_wire.PeerPart():
                self._send(message.source, message)

    def _add(self, index: int, requests: list[wire.EngineCoreRequest]) -> None:
        try:
            check_room(
                requests,
                num_in_flight=len(self._owners),
                num_waiting_tokens=self._engine.num_waiting_tokens,
                config=self._config,
                limit=self._config.scheduler.max_num_queued_reqs,
                metrics=self._own,
            )
            self._engine.add(requests)
        except OctavoError as error:
            refused = [_failed(request.request_id, error) for request in requests]
            self._send(index, wire.EngineCoreOutputs(refused))
            return
        for request in requests:
            self._owners[request.request_id] = index

    def _pass_to_peer(self, message: front_wire.PeerRequest | front_wire.PeerLeft) -> None:
        if message.target in self._identities:
            self._send(message.target, message)
        elif isinstance(message, front_wire.PeerRequest):
            gone = front_wire.PeerPart(
                message.call_id, message.source, status=_UNAVAILABLE, is_last=True
            )
            self._send(message.source, gone)

    # What the engine says

    def _deliver(self, outputs: list[wire.EngineCoreOutput]) -> None:
        """Pass each front what is for it."""
        owners = self._owners
        shares: dict[int, list[wire.EngineCoreOutput]] = {}
        for output in outputs:
            name = output.request_id
            index = owners.get(name) if output.finish_reason is None else owners.pop(name, None)
            if index is None:
                continue
            share = shares.get(index)
            if share is None:
                shares[index] = [output]
            else:
                share.append(output)
        for index, share in shares.items():
            self._send(index, wire.EngineCoreOutputs(share))

    async def _watch_engine(self) -> None:
        """Tell the fronts where the engine is, whenever that has changed, and its end."""
        dying = asyncio.ensure_future(self._engine.wait_dead())
        try:
            while not dying.done():
                self._tell_status()
                await asyncio.wait({dying}, timeout=_STATUS_INTERVAL)
            error = dying.result()
            self._status = self._engine_status()
            self._broadcast(self._status)
            self._last_words = wire.Failed(str(error), type(error).__name__)
            self._broadcast(self._last_words)
        finally:
            dying.cancel()

    def _tell_status(self) -> None:
        """Tell the fronts where the engine is, if they don't know."""
        status = self._engine_status()
        if status == self._status:
            return
        was, self._status = self._status, status
        self._broadcast(status)
        if was is None or was.state == EngineState.STARTING.value:
            self._tell_limits()

    def _engine_status(self) -> front_wire.EngineStatus:
        engine = self._engine
        return front_wire.EngineStatus(
            engine.state.value, engine.stage, engine.progress, engine.num_restarts
        )

    def _tell_limits(self) -> None:
        if self._engine.limits is not None:
            self._broadcast(self._engine.limits)

    # Calls

    async def call_fronts(self, method: str, *args: Any) -> list[Any]:
        """Have each front that is there do the same, and return what they answer."""
        if method == "set_sleep_level":
            self._sleep_level = args[0]  # for fronts that are started later
        answers = await asyncio.gather(
            *(self._call_front(index, method, args) for index in self._identities),
            return_exceptions=True,
        )
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _call_front(self, index: int, method: str, args: Sequence[Any]) -> Any:
        return await self._calls.ask(
            lambda call_id: self._send(index, front_wire.FrontCall(call_id, method, list(args))),
            method,
            _CALL_SECONDS,
        )

    async def _call_fronts_for(
        self, index: int, call_id: int, method: str, args: list[Any]
    ) -> None:
        results = await self.call_fronts(method, *args)
        self._send(index, front_wire.FrontsAnswer(call_id, results))

    async def _call_engine(self, index: int, call_id: int, method: str, args: list[Any]) -> None:
        try:
            result = await self._engine.call(method, *args)
        except OctavoError as error:
            self._send(index, wire.UtilityResult(call_id, error=str(error)))
        else:
            self._tell_status()  # an engine that was woken up is ready now
            self._send(index, wire.UtilityResult(call_id, result))

    async def _collect(self, index: int, call_id: int) -> None:
        """Answer what was counted up to now, by fronts that answer; else up to a second ago."""
        await self.call_fronts("report")
        answer = front_wire.Totals(call_id, self._totals(), self._engine.stats)
        self._send(index, answer)

    def _totals(self) -> MetricsReport:
        own = report_of(self._own, HTTPCounts())
        return sum_reports([self._past, own, *self._reports.values()])

    # Sending

    def _welcome(self, index: int) -> None:
        self._send(index, front_wire.Welcome(self._config, self._sleep_level, self._is_serving))
        self._send(index, self._engine_status())
        if self._model is not None:
            self._send(index, self._model)
        if self._engine.limits is not None:
            self._send(index, self._engine.limits)
        if self._last_words is not None:
            self._send(index, self._last_words)
        for _ in range(self._num_drains):
            self._send(index, front_wire.Drain())

    def _broadcast(self, message: FromHub) -> None:
        for index in self._identities:
            self._send(index, message)

    def _send(self, index: int, message: FromHub) -> None:
        identity = self._identities.get(index)
        if identity is not None:
            # Without a high-water mark a send never waits, so its future is done already.
            self._socket.send_multipart([identity, front_wire.encode(message)])

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failed(request_id: str, error: OctavoError) -> wire.EngineCoreOutput:
    kind = type(error).__name__
    return wire.EngineCoreOutput(request_id, [], "error", error=str(error), error_kind=kind)
