"""A front's end of the socket to the hub: an engine, as far as the front can tell."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import EngineDeadError, OctavoError, error_named
from octavo_server import front_wire
from octavo_server.engine_handle import EngineState
from octavo_server.engine_keeper import CALL_SECONDS
from octavo_server.front_wire import FromHub, ToHub
from octavo_server.pending_calls import PendingCalls

logger = logging.getLogger(__name__)

# The hub itself waits for slow fronts, for less than this.
_FRONTS_SECONDS = 10.0

Result = TypeVar("Result")


class HubLink:
    """An `EngineHandle` on the engine that the hub keeps, and the way to the other fronts.

    Args:
        address: ZMQ address that the hub has bound.
        index: Which of the fronts this is.

    Attributes:
        on_outputs: Gets what each step brings for this front's requests.
        num_drains: How often the server was told to end.
        on_drain: Called when it is; the second time, at once.
        on_call: Gets the name and arguments of what concerns the whole server, and returns the
            answer.
        on_peer: Gets what other fronts ask of this one and answer to it.
    """

    def __init__(self, address: str, index: int) -> None:
        self.index = index
        self.state = EngineState.STARTING
        self.stage = "starting the engine process"
        self.progress: float | None = None
        self.stats = wire.SchedulerStats()
        self.limits: wire.Ready | None = None
        self.num_restarts = 0
        self.num_waiting_tokens = 0  # The hub counts them, over all fronts.
        self.on_outputs: Callable[[list[wire.EngineCoreOutput]], None] = lambda outputs: None
        self.num_drains = 0
        self.on_drain: Callable[[], None] = lambda: None
        self.on_call: Callable[[str, list[Any]], Any] = lambda method, args: None
        self.on_peer: Callable[
            [
                front_wire.PeerRequest
                | front_wire.PeerPart
                | front_wire.PeerLeft
                | front_wire.FrontLost
            ],
            None,
        ] = lambda message: None
        self._owed: set[str] = set()
        # Not from 1: what the hub still answers to a front that is gone comes to its successor.
        self._calls = PendingCalls(secrets.randbits(48))
        loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[front_wire.Welcome] = loop.create_future()
        self._model: asyncio.Future[front_wire.ModelFound] = loop.create_future()
        self._ready: asyncio.Future[wire.Ready] = loop.create_future()
        self._death: asyncio.Future[OctavoError] = loop.create_future()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._reading = loop.create_task(self._read())
        self.send(front_wire.FrontHello(index))

    @property
    def num_in_flight(self) -> int:
        """Requests of this front that were added and have not ended."""
        return len(self._owed)

    async def welcome(self) -> front_wire.Welcome:
        """Wait for the settings."""
        return await asyncio.shield(self._welcome)

    async def model(self) -> front_wire.ModelFound:
        """Wait for the hub to find the model.

        Raises:
            OctavoError: The engine could not start meanwhile.
        """
        return await self._unless_dead(self._model)

    def configure(self, config: EngineConfig) -> None:
        """Do nothing: the hub does that."""

    def report_stage(self, stage: str, progress: float | None) -> None:
        """Do nothing: the hub finds the model."""

    async def wait_ready(self) -> wire.Ready:
        """Wait until the engine can take requests.

        Raises:
            OctavoError: Start-up failed.
        """
        return await self._unless_dead(self._ready)

    async def wait_dead(self) -> OctavoError:
        """Wait until the engine has ended for good, and return why."""
        return await asyncio.shield(self._death)

    def add(self, requests: Sequence[wire.EngineCoreRequest]) -> None:
        """Start the choices of one API request. What the hub refuses ends with an error.

        Raises:
            EngineDeadError: The engine has ended, or has not started.
        """
        if self.state not in (EngineState.READY, EngineState.RESTARTING):
            raise self._why_not()
        self._owed.update(request.request_id for request in requests)
        self.send(front_wire.AddRequests(list(requests)))

    def abort(self, engine_request_ids: Sequence[str]) -> None:
        """End requests whose clients have left. Unknown ids are ignored."""
        known = [name for name in engine_request_ids if name in self._owed]
        if known:
            self._owed.difference_update(known)
            self.send(wire.AbortRequests(known))

    async def call(self, method: str, *args: Any) -> Any:
        """Call one of the engine's operator functions; see `EngineHandle.call`."""
        if self.state in (EngineState.STARTING, EngineState.DEAD):
            raise self._why_not()
        # Loading a model takes as long as it takes.
        timeout = None if method == "wake_up" else CALL_SECONDS
        return await self._ask(
            lambda call_id: wire.UtilityCall(call_id, method, list(args)), method, timeout
        )

    async def call_fronts(self, method: str, *args: Any) -> list[Any]:
        """Have each front, this one too, do the same, and return what they answer.

        Raises:
            RequestFailedError: The hub did not answer in time.
        """
        results: list[Any] = await self._ask(
            lambda call_id: front_wire.CallFronts(call_id, method, list(args)),
            method,
            _FRONTS_SECONDS,
        )
        return results

    async def collect_metrics(self) -> front_wire.Totals:
        """Return what all fronts have counted.

        Raises:
            RequestFailedError: The hub did not answer in time.
        """
        totals: front_wire.Totals = await self._ask(
            front_wire.CollectMetrics, "metrics", _FRONTS_SECONDS
        )
        return totals

    def send(self, message: ToHub) -> None:
        """Send a message to the hub."""
        self._socket.send_multipart([front_wire.encode(message)])

    async def close(self, grace: float = 3.0) -> None:
        """Send what is left, for at most a second; the engine is the hub's."""
        self._reading.cancel()
        self._socket.close(linger=1000)
        await asyncio.to_thread(self._context.term)

    async def _unless_dead(self, wanted: asyncio.Future[Result]) -> Result:
        waiting: set[asyncio.Future[Any]] = {wanted, self._death}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise self._death.result()
        return wanted.result()

    async def _ask(self, question: Callable[[int], ToHub], name: str, timeout: float | None) -> Any:
        return await self._calls.ask(lambda call_id: self.send(question(call_id)), name, timeout)

    async def _read(self) -> None:
        while True:
            (frame,) = await self._socket.recv_multipart()
            try:
                self._handle(front_wire.decode_from_hub(frame))
            except Exception:
                logger.exception("A message of the hub could not be handled")

    def _handle(self, message: FromHub) -> None:
        match message:
            case wire.EngineCoreOutputs(outputs):
                for output in outputs:
                    if output.finish_reason is not None:
                        self._owed.discard(output.request_id)
                self.on_outputs(outputs)
            case front_wire.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case front_wire.ModelFound():
                if not self._model.done():
                    self._model.set_result(message)
            case front_wire.EngineStatus(state, stage, progress, num_restarts):
                self.state = EngineState(state)
                self.stage, self.progress, self.num_restarts = stage, progress, num_restarts
            case wire.Ready():
                self.limits = message
                if not self._ready.done():
                    self._ready.set_result(message)
            case wire.Failed(text, kind, field):
                self._die(error_named(kind, text, field, default=EngineDeadError))
            case wire.UtilityResult(call_id, result, problem):
                self._calls.settle(call_id, result, problem)
            case front_wire.FrontsAnswer(call_id, results):
                self._calls.settle(call_id, results)
            case front_wire.Totals(call_id):
                self._calls.settle(call_id, message)
            case front_wire.FrontCall(call_id, method, args):
                self.send(front_wire.FrontAnswer(call_id, self.on_call(method, args)))
            case front_wire.Drain():
                self.num_drains += 1
                self.on_drain()
            case (
                front_wire.PeerRequest()
                | front_wire.PeerPart()
                | front_wire.PeerLeft()
                | front_wire.FrontLost()
            ):
                self.on_peer(message)

    def _why_not(self) -> OctavoError:
        if self._death.done():
            return self._death.result()
        asleep = self.state is EngineState.ASLEEP
        return EngineDeadError(f"the engine {'sleeps' if asleep else 'has not started'}")

    def _die(self, error: OctavoError) -> None:
        """Take the engine's end: the hub has failed what it owed already, all but what crossed."""
        self.state = EngineState.DEAD
        self.stage, self.progress = str(error), None
        if not self._death.done():
            self._death.set_result(error)
        owed, self._owed = list(self._owed), set()
        self.on_outputs(
            [
                wire.EngineCoreOutput(
                    name, [], "error", error=str(error), error_kind="EngineDeadError"
                )
                for name in owed
            ]
        )
