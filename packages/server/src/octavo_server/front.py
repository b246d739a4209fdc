"""The front process: socket first, then the engine, then everything else while it loads."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import os
import re
import shlex
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import setproctitle

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError, EngineDeadError
from octavo_core.process import end_of_start_up, without_collections
from octavo_server import __version__
from octavo_server.engine_process import (
    EngineProcess,
    EngineSpawner,
    EngineTarget,
    engine_target,
)
from octavo_server.keys import KeyRing, make_key_ring
from octavo_server.logging_setup import configure_logging
from octavo_server.tls import make_ssl_context, refresh_certificate
from octavo_server.tracing import RequestTracer, make_tracer

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from octavo_server.api.context import LoadedModel, ServerContext
    from octavo_server.engine_client import EngineClient
    from octavo_server.model_source import ResolvedModel

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

EXIT_ENGINE_DEAD = 1

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# As browsers send it: without a path, or even a slash.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_BACKLOG = 2048
# What waits in the kernel for one client, which Linux would let grow to megabytes. Half of it is
# lost to bookkeeping; the rest is 2 MB a second at a round trip of 100 ms, and text is less.
_SEND_BUFFER_BYTES = 256 * 1024
# Seconds for streams to send their last event once their requests were failed.
_LAST_EVENT_SECONDS = 2.0
_INTERRUPTED_LOAD_SECONDS = 2.0
_IDLE_POLL_SECONDS = 0.02
_LOADING_THREAD = "loading"


def run_front(config: EngineConfig, target: EngineTarget | None = None) -> int:
    """Serve until a signal or the engine's death for good.

    Args:
        config: All settings; the model's path is found here.
        target: What the engine process runs; by default what the executor asks for.

    Returns:
        Exit code: 0 after a signal, 1 if the engine died.

    Raises:
        ConfigError: The address can't be listened on, or a setting doesn't fit the model.
        ModelError: The model can't be found or loaded.
        EngineDeadError: The engine died while it started.
    """
    if config.server.api_server_count > 1:
        from octavo_server.front_group import run_fronts

        return run_fronts(config, target)
    setproctitle.setproctitle("octavo: front")
    configure_logging(config.server.log_level, "front", json_lines=config.observability.json_logs)
    keys, ssl_context = make_key_ring(config.access), make_ssl_context(config.access)
    endpoint = config.observability.otlp_traces_endpoint
    tracer = make_tracer(endpoint) if endpoint else None
    listener = bind_socket(config.server.host, config.server.port)
    with contextlib.closing(listener):
        check_settings(config)
        warn_of_open_door(config, listener)
        # Until the event loop runs, signals are only noted: an exception in the middle of
        # spawning would leave a process that nobody knows.
        noted: list[int] = []
        for signal_number in _SIGNALS:
            signal.signal(signal_number, lambda number, _frame: noted.append(number))
        spawners = [
            EngineSpawner(
                config.server.log_level,
                target or engine_target(config.parallel.backend),
            )
            for _ in range(config.parallel.data_parallel_size)
        ]
        # Engines spend seconds on importing torch; they start before our own imports.
        engines = [spawner.spawn() for spawner in spawners]
        try:
            front = Front(config, listener, engines, spawners, noted, keys, ssl_context, tracer)
            code = asyncio.run(front.run())
        finally:
            for spawner in spawners:
                spawner.end()
            _join_loading_thread()
            if tracer is not None:
                tracer.shutdown()
    return code


def check_settings(config: EngineConfig) -> None:
    """Refuse parsers and origins that are none, and a bad template, before any work is done."""
    from octavo_server.reasoning_parsers import check_reasoning_parser
    from octavo_server.tool_parsers import check_tool_parser

    check_tool_parser(config.server.tool_call_parser)
    check_reasoning_parser(config.server.reasoning_parser)
    for origin in config.access.allowed_origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"allowed_origins has {origin!r}; an origin is a scheme and a host, such as "
                f"https://app.example, or * for all of them.",
                field="allowed_origins",
            )
    if config.server.chat_template is not None:
        from octavo_server.tokenizer import read_chat_template

        read_chat_template(config.server.chat_template)


def bind_socket(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Listen on an address, so that a port in use is known before any work is done.

    Args:
        host: Name or address.
        port: 0 takes a free one.
        share: Let other sockets that share listen on the same address.

    Returns:
        The listening socket. Python opens sockets close-on-exec: the engine does not inherit it.

    Raises:
        ConfigError: The host is unknown, or the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {_reason(error)}.", field="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        # A quick restart need not wait for the last one's connections to expire.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        # Only listening makes it ours: two sockets with SO_REUSEADDR may bind the same port.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host} port {port}: {_reason(error)}; choose another --port "
            f"(0 takes a free one) or --host.",
            field="port",
        ) from None
    return listener


class Front:
    """One run of the front: loads, serves, and ends in order."""

    def __init__(
        self,
        config: EngineConfig,
        listener: socket.socket,
        engines: list[EngineProcess],
        spawners: list[EngineSpawner],
        noted_signals: list[int],
        keys: KeyRing | None = None,
        ssl_context: ssl.SSLContext | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._keys = keys
        self._ssl_context = ssl_context
        self._noted_signals = noted_signals
        self._config = config
        self._listener = listener
        self._engines = engines
        self._spawners = spawners
        self._stop_requests = 0
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the engine's death, and return the exit code."""
        self._handle_signals()
        with without_collections():
            from octavo_server.api.app import create_app, guard_app
            from octavo_server.api.context import ServerContext

        client = self._make_client()
        client.metrics.tracer = self._tracer
        context = ServerContext(client, self._config)
        context.responses.max_responses = self._config.server.max_stored_responses
        inner_app = create_app(context)
        self._meet_others(context, inner_app)
        app = guard_app(inner_app, context, self._keys)
        server = _make_server(app, self._config, self._ssl_context)
        self._serving = asyncio.create_task(self._serve(server))
        background = self._start_background(context)
        try:
            return await self._run(context, server)
        finally:
            for task in background:
                task.cancel()
            server.should_exit = server.force_exit = True
            await self._until_forced(asyncio.wait({self._serving}, timeout=1.0))
            await context.grammar_checker.close()
            closing = asyncio.create_task(client.close())
            await self._until_forced(asyncio.wait({closing}))
            if not closing.done():
                for spawner in self._spawners:
                    spawner.kill()
            await closing

    async def _serve(self, server: uvicorn.Server) -> None:
        await server.serve(sockets=[self._listener])

    def _meet_others(self, context: ServerContext, app: ASGIApp) -> None:
        """Be one of several fronts, or as here the only one."""

    def _make_client(self) -> EngineClient:
        from octavo_server.engine_client import EngineClient
        from octavo_server.engine_group import keep_engines

        engine = keep_engines(self._engines, self._spawners, self._config)
        return EngineClient(engine, self._config.scheduler.max_num_queued_reqs)

    async def _run(self, context: ServerContext, server: uvicorn.Server) -> int:
        loading = asyncio.create_task(self._load(context.client))
        if not await self._unless_stopped(loading):
            logger.info("Stopped while loading")
            return 0
        context.model = loading.result()
        end_of_start_up()
        self._announce(context.model)

        dying = asyncio.create_task(context.client.wait_dead())
        if await self._unless_stopped(dying):
            # Streams have got the error already; let it out before the connections close.
            context.drain.set()
            await self._close_connections(server, _LAST_EVENT_SECONDS)
            logger.critical("Exiting: the engine has ended: %s", dying.result())
            return EXIT_ENGINE_DEAD
        await self._drain(context, server)
        return 0

    def _start_background(self, context: ServerContext) -> list[asyncio.Task[None]]:
        from octavo_server.stats_log import log_stats

        tasks = []
        interval = self._config.observability.log_stats_interval
        if interval:
            tasks.append(asyncio.create_task(log_stats(context.client, interval)))
        access = self._config.access
        if self._ssl_context is not None and access.enable_ssl_refresh:
            tasks.append(asyncio.create_task(refresh_certificate(self._ssl_context, access)))
        return tasks

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signal_number in _SIGNALS:
            loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        for noted in self._noted_signals:
            self._on_signal(noted)

    def _on_signal(self, signal_number: int) -> None:
        self._stop_requests += 1
        logger.info("Got %s", signal.Signals(signal_number).name)
        if self._stop_requests == 1:
            self._stop.set()
        else:
            self._force.set()

    async def _unless_stopped(self, work: asyncio.Task[Any]) -> bool:
        """Wait for `work`, and return True, or for a signal, and cancel it and return False."""
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({work, stopping, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._serving.done():
            self._serving.result()
            raise RuntimeError("the HTTP server has ended by itself")
        if self._stop.is_set():
            work.cancel()
            await asyncio.wait({work})
            return False
        return True

    async def _until_forced(self, work: Awaitable[Any]) -> None:
        """Wait for `work`, but not beyond a second signal."""
        task = asyncio.ensure_future(work)
        forced = asyncio.create_task(self._force.wait())
        await asyncio.wait({task, forced}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, forced):
            each.cancel()

    async def _load(self, client: EngineClient) -> LoadedModel:
        """Find the model, read its tokenizer while the engine loads it, and wait for both."""
        path, name = await self._find_model(client)
        # Only now, so that the engine does not wait for these imports (0.4 s) to hear of its model.
        with without_collections():
            from octavo_core.memory_planner import longest_model_len
            from octavo_core.model_spec import read_model_spec
            from octavo_core.pooler_spec import read_pooler_spec
            from octavo_server.answer_parser import AnswerFormat
            from octavo_server.api.context import LoadedModel
            from octavo_server.input_processor import InputProcessor
            from octavo_server.output_processor import OutputProcessor
            from octavo_server.pooling_input_processor import PoolingInputProcessor
            from octavo_server.sampling_defaults import read_sampling_defaults
            from octavo_server.tokenizer import load_tokenizer, read_chat_template

        tokenizer = await _in_daemon_thread(lambda: load_tokenizer(path))
        if (template := self._config.server.chat_template) is not None:
            tokenizer.chat_template = read_chat_template(template)
        spec = await _in_daemon_thread(lambda: read_model_spec(path))
        client.output_processor = OutputProcessor(tokenizer)
        pooler = read_pooler_spec(
            self._config.replace("the model that was found", model_path=str(path)), spec
        )
        length, policy = longest_model_len(spec, self._config), self._config.scheduler
        if pooler is None:
            input_processor = InputProcessor(
                tokenizer,
                spec,
                length,
                policy.scheduling_policy,
                control_tokens_in_messages=self._config.server.control_tokens_in_messages,
            )
        else:
            input_processor = PoolingInputProcessor(
                tokenizer, spec, pooler, length, policy.scheduling_policy
            )
        chat_problem = await _in_daemon_thread(input_processor.chat_problem)
        if chat_problem is not None and pooler is None:
            logger.warning("Chat requests will be refused. %s", chat_problem)
        answer_format = AnswerFormat.of(tokenizer.chat_template, self._config.server)
        ready = await client.wait_ready()
        input_processor.set_limits(ready.max_model_len, ready.kv_cache_tokens)
        if pooler is None:
            logger.info("Calls of tools and reasoning are read as %s", answer_format.describe())
        return LoadedModel(
            name=name,
            max_model_len=ready.max_model_len,
            tokenizer=tokenizer,
            input_processor=input_processor,
            can_chat=chat_problem is None,
            answer_format=answer_format,
            sampling_defaults=read_sampling_defaults(path),
        )

    async def _find_model(self, client: EngineClient) -> tuple[Path, str]:
        """Return where the model is and its name, after telling the engine."""
        loop = asyncio.get_running_loop()

        def report(stage: str, progress: float | None) -> None:
            loop.call_soon_threadsafe(client.report_stage, stage, progress)

        resolved = await find_model(self._config, self._unless_stopping(report))
        client.configure(
            self._config.without_secrets().replace(
                "the model that was found", model_path=str(resolved.path)
            )
        )
        return resolved.path, self._config.model.served_model_name or resolved.name

    def _unless_stopping(
        self, report: Callable[[str, float | None], object]
    ) -> Callable[[str, float | None], None]:
        """Return a callback for the loading thread. After a signal it raises, which ends a download
        together with the process that does it.
        """

        def on_progress(stage: str, progress: float | None) -> None:
            if self._stop.is_set():
                raise InterruptedError("the server is shutting down")
            report(stage, progress)

        return on_progress

    def _announce(self, model: LoadedModel) -> None:
        announce(self._config, self._listener, model.name, *example_request(model))

    async def _drain(self, context: ServerContext, server: uvicorn.Server) -> None:
        """Take nothing new, and let what runs finish in time or end with an error."""
        context.drain.set()
        timeout = self._config.server.shutdown_timeout
        if context.client.num_in_flight:
            logger.info(
                "Waiting up to %g s for %d running answers; a second signal ends them",
                timeout,
                context.client.num_in_flight,
            )
        # The listener stays open, so that new requests get their 503 and not a broken connection.
        await self._until_idle(context, timeout)
        context.client.fail_all(EngineDeadError("the server is shutting down"))
        await self._close_connections(server, _LAST_EVENT_SECONDS)

    async def _until_idle(self, context: ServerContext, timeout: float) -> None:
        """Wait until all answers are out, until `timeout` or `_force`."""
        deadline = time.monotonic() + timeout
        while context.num_open and not self._force.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    async def _close_connections(self, server: uvicorn.Server, timeout: float) -> None:
        """Stop listening and wait for the connections to end, until `timeout` or `_force`."""
        server.should_exit = True
        forced = asyncio.create_task(self._force.wait())
        await asyncio.wait(
            {self._serving, forced}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        forced.cancel()


def example_request(model: LoadedModel) -> tuple[str, dict[str, Any]]:
    """Return a path and the body's fields of a request that a model answers."""
    if model.pooler is not None:
        path = "/classify" if model.pooler.is_classifier else "/v1/embeddings"
        return path, {"input": "Octopuses have three hearts."}
    # Greedy: small models say odd things at a temperature of 1.
    options = {"max_tokens": 64, "temperature": 0}
    if model.can_chat:
        question = {"role": "user", "content": "What is the chemical symbol for water?"}
        return "/v1/chat/completions", {"messages": [question], **options}
    return "/v1/completions", {"prompt": "Once upon a time", **options}


def announce(
    config: EngineConfig,
    listener: socket.socket,
    model_name: str,
    path: str,
    fields: dict[str, Any],
) -> None:
    """Print where the server is, and a command that tries it: an `example_request`."""
    host, port = config.server.host, listener.getsockname()[1]
    scheme = "http" if config.access.ssl_certfile is None else "https"
    place = f"Octavo {__version__} serves {model_name} at {scheme}://{_url_host(host)}:{port}"
    body = {"model": model_name, **fields}
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    access = config.access
    key = "-H 'X-Api-Key: KEY' " if access.api_key or access.api_key_file else ""
    command = (
        f"curl {scheme}://{_url_host(reachable)}:{port}{path} "
        f"{key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )
    try:
        print(place, command, sep="\n", flush=True)
    except OSError as error:
        logger.warning("Standard output can't be written: %s", _reason(error))
        # Nor at the exit, which would be another failure.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


async def find_model(
    config: EngineConfig, on_progress: Callable[[str, float | None], None]
) -> ResolvedModel:
    """Find the model, which may mean to fetch it.

    Args:
        on_progress: Called in another thread.

    Raises:
        ModelError: There is no such model.
    """
    from octavo_server.model_source import resolve_model

    model = config.model
    return await _in_daemon_thread(
        lambda: resolve_model(
            model.model,
            model.revision,
            on_progress,
            needs_weights=model.load_format != "dummy",
        )
    )


def warn_of_open_door(config: EngineConfig, listener: socket.socket) -> None:
    """Say so if others than this machine's users get in, and without a key."""
    access = config.access
    address = listener.getsockname()[0]
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    if not access.api_key and access.api_key_file is None:
        logger.warning(
            "Anybody who can reach %s may use this server: it was given no --api-key or "
            "--api-key-file",
            config.server.host,
        )


def _make_server(
    app: Any, config: EngineConfig, ssl_context: ssl.SSLContext | None
) -> uvicorn.Server:
    import uvicorn

    from octavo_server.http_protocol import (
        bounded_protocol,
        num_possible_connections,
        raise_file_limit,
    )

    max_connections = num_possible_connections(config.limits.max_connections, raise_file_limit())

    class Server(uvicorn.Server):
        """A server that leaves the signals to us, and accepts one connection at a time."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for listener in sockets or ():
                listener.listen(_BACKLOG)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    logging.getLogger("uvicorn.error").addFilter(_is_no_mistake_of_clients)
    uvicorn_config = uvicorn.Config(
        app,
        # So many asyncio accepts before anything else has its turn, and where files run out it
        # fails as often, with a line of the log each. So many may wait in the kernel, too, which
        # `startup` mends.
        backlog=1,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=bounded_protocol(config.limits, config.server.write_timeout, max_connections),
        ws="none",
        h11_max_incomplete_event_size=config.limits.max_request_header_size,
        server_header=False,
        # A client must not be able to say that it is another one.
        proxy_headers=False,
        timeout_keep_alive=config.limits.keep_alive_timeout,
        # Its own limit comes last, behind the steps of `_drain`.
        timeout_graceful_shutdown=math.ceil(
            config.server.shutdown_timeout + 2 * _LAST_EVENT_SECONDS
        ),
    )
    uvicorn_config.load()
    uvicorn_config.ssl = ssl_context
    return Server(uvicorn_config)


def _is_no_mistake_of_clients(record: logging.LogRecord) -> bool:
    """Keep out what anybody could fill the log with, and what to install for WebSockets."""
    words = ("Invalid HTTP request", "Unsupported upgrade", "WebSocket library")
    return not any(part in str(record.msg) for part in words)


async def _in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread that does not hold up the exit of the process.

    A signal during a long download must end the server; a thread of the event loop's
    own pool would be waited for.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # one of both is set

    def run() -> None:
        try:
            outcome: tuple[Result | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        # The loop has closed if the server was stopped in the meantime.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=_LOADING_THREAD, daemon=True).start()
    return await future


def _join_loading_thread() -> None:
    """Give a download that was interrupted the time to clean up."""
    for thread in threading.enumerate():
        if thread.name == _LOADING_THREAD:
            thread.join(_INTERRUPTED_LOAD_SECONDS)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno).lower()
    return str(error)


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
