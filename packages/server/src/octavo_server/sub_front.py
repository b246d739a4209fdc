"""One of several front processes: it serves HTTP, and the hub has everything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import setproctitle

from octavo_core import wire
from octavo_core.config import EngineConfig
from octavo_core.errors import OctavoError, UserError
from octavo_core.process import BEATS_PER_TIMEOUT, HeartbeatMonitor, exit_with_parent
from octavo_server.front import Front, example_request
from octavo_server.front_wire import FrontReady, Report
from octavo_server.hub_link import HubLink
from octavo_server.keys import KeyRing, make_key_ring
from octavo_server.logging_setup import configure_logging
from octavo_server.tls import make_ssl_context
from octavo_server.tracing import RequestTracer, make_tracer

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from octavo_server.api.context import LoadedModel, ServerContext
    from octavo_server.engine_client import EngineClient

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
# Most seconds between two reports. What a front that crashes has counted since is lost.
_REPORT_INTERVAL = 1.0


def run_sub_front(address: str, index: int, listener: socket.socket, log_level: str) -> None:
    """Run one front until the hub says to stop; the target of a spawned process.

    Args:
        address: ZMQ address of the hub.
        index: Which of the fronts this is.
        listener: Its share of the server's address, listening already.
        log_level: Least severe line logged.
    """
    exit_with_parent(Path(address.removeprefix("ipc://")).parent)
    setproctitle.setproctitle(f"octavo: front {index}")
    configure_logging(log_level, f"front {index}")
    # The hub decides: a service manager that signals all processes must not cut off answers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.exit(asyncio.run(_run(address, index, listener)))


async def _run(address: str, index: int, listener: socket.socket) -> int:
    link = HubLink(address, index)
    try:
        welcome = await link.welcome()
        config = welcome.config.replace("the hub, which logs them", log_stats_interval=0.0)
        endpoint = config.observability.otlp_traces_endpoint
        tracer = make_tracer(endpoint) if endpoint else None
        front = SubFront(
            config,
            listener,
            link,
            sleep_level=welcome.sleep_level,
            is_late=welcome.is_late,
            keys=make_key_ring(config.access),
            ssl_context=make_ssl_context(config.access),
            tracer=tracer,
        )
        try:
            return await front.run()
        finally:
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)
    except UserError as error:
        link.send(wire.Failed(error.message, type(error).__name__, error.field))
    except OctavoError as error:
        link.send(wire.Failed(str(error), type(error).__name__))
    except Exception as error:
        logger.exception("A front failed")
        link.send(wire.Failed(f"{type(error).__name__}: {error}", "EngineDeadError"))
    await link.close()
    return EXIT_FAILURE


class SubFront(Front):
    """A front whose engine, model and signals come from the hub."""

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        link: HubLink,
        *,
        sleep_level: int | None,
        is_late: bool,
        keys: KeyRing | None,
        ssl_context: ssl.SSLContext | None,
        tracer: RequestTracer | None,
    ) -> None:
        super().__init__(config, listener, [], [], [], keys, ssl_context, tracer)
        self._link = link
        self._sleep_level = sleep_level
        self._may_accept = asyncio.Event()
        if not is_late:
            self._may_accept.set()

    async def _serve(self, server: uvicorn.Server) -> None:
        """Serve at once, or in the place of another front when the model is loaded.

        Until then clients wait for their connection, where a 503 would tell them that a server
        which has answered all the time is loading.
        """
        await self._may_accept.wait()
        await super()._serve(server)

    def _make_client(self) -> EngineClient:
        from octavo_server.engine_client import EngineClient

        return EngineClient(self._link, self._config.scheduler.max_num_queued_reqs)

    def _meet_others(self, context: ServerContext, app: ASGIApp) -> None:
        from octavo_server.api.fronts import SeveralFronts, answer_call
        from octavo_server.api.peer_requests import PeerDesk
        from octavo_server.metrics_report import report_of

        desk = PeerDesk(self._link, app)
        context.fronts = SeveralFronts(self._link, desk, self._config.server.api_server_count)
        context.sleep_level = self._sleep_level
        self._link.on_peer = desk.on_message

        def report() -> None:
            self._link.send(Report(report_of(context.client.metrics, context.http)))

        def on_call(method: str, args: list[Any]) -> Any:
            return report() if method == "report" else answer_call(context, method, args)

        # They are signs of life, too.
        timeout = self._config.parallel.heartbeat_timeout
        interval = min(_REPORT_INTERVAL, timeout / BEATS_PER_TIMEOUT)

        async def report_now_and_then() -> None:
            while True:
                await asyncio.sleep(interval)
                report()

        self._link.on_call = on_call
        self._reporting = asyncio.create_task(report_now_and_then())

    def _handle_signals(self) -> None:
        self._link.on_drain = lambda: self._on_signal(signal.SIGTERM)
        for _ in range(self._link.num_drains):  # while this was being started
            self._link.on_drain()

    async def _find_model(self, client: EngineClient) -> tuple[Path, str]:
        found = await self._link.model()
        return Path(found.path), found.name

    def _announce(self, model: LoadedModel) -> None:
        self._may_accept.set()
        self._link.send(FrontReady(*example_request(model)))


class FrontProcess:
    """A spawned front process.

    Args:
        address: ZMQ address of the hub.
        index: Which of the fronts this is.
        listener: Its socket, which stays open here for the process's successor.
        config: All settings.

    Attributes:
        monitor: Gets its signs of life.
        watch: Waits for them to fail.
    """

    def __init__(
        self, address: str, index: int, listener: socket.socket, config: EngineConfig
    ) -> None:
        import multiprocessing

        from octavo_core.process import start_without_interrupts

        self.index = index
        self.is_ready = False
        self.monitor = HeartbeatMonitor(config.parallel.heartbeat_timeout)
        self.watch: asyncio.Task[None] | None = None
        self.process = multiprocessing.get_context("spawn").Process(
            target=run_sub_front,
            args=(address, index, listener, config.server.log_level),
            name=f"octavo-front-{index}",
        )
        start_without_interrupts(self.process)

    def describe_end(self) -> str:
        """Say in words how the process ended."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"front {self.index} ended with signal {-code}"
        return f"front {self.index} ended with exit code {code}"

    def end(self) -> None:
        """Kill the process, if it is still there."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        with contextlib.suppress(ValueError):
            self.process.close()
