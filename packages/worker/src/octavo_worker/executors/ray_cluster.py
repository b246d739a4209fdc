"""An executor whose workers are actors of a Ray cluster, so that a model may span machines.

Ray places and starts the actors, and notices when one is gone. What they are told, and what they
answer, is the same msgpack as between processes; tensors go between them by torch.distributed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError, EngineDeadError
from octavo_core.model_spec import ModelSpec
from octavo_core.process import before_orphan_ends
from octavo_worker.executors import messages
from octavo_worker.executors.call import Call
from octavo_worker.executors.workers import WorkersExecutor

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT = 60.0
"""Seconds that the cluster gets to find room; one that grows by itself needs some."""

PROGRESS_INTERVAL = 0.2
"""Seconds between two looks at how far a worker's start is."""


class RayExecutor(WorkersExecutor):
    """Places the workers in a Ray cluster: the one that there is, or a local one of our own.

    Which cluster is Ray's to find: ``RAY_ADDRESS``, or one that was started on this machine.
    The model's files must be at the same path on every machine.

    Args:
        config: The engine's configuration.
        spec: The model's hyper-parameters.

    Raises:
        ConfigError: The cluster has no room for the workers.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            _connect()
        try:
            self._group = _place(config)
        except BaseException:
            self._disconnect()
            raise
        size = config.parallel.world_size
        self._actors = [_start_actor(self._group, rank, config) for rank in range(size)]
        self._ended = False
        hosts = ray.get([actor.host.remote() for actor in self._actors])
        rendezvous = _rendezvous(self._actors[0], hosts)
        logger.info("Ray has placed %d workers on %d machines", size, len(set(_nodes(self._group))))
        encoded = msgspec.msgpack.encode(config), msgspec.msgpack.encode(spec)
        nodes = _nodes(self._group)
        workers = [
            RayWorkerHandle(
                rank, actor, actor.start.remote(rank, *encoded, rendezvous, nodes.count(node))
            )
            for rank, (actor, node) in enumerate(zip(self._actors, nodes, strict=True))
        ]
        super().__init__(config, workers)

    def shutdown(self) -> None:
        """End the workers and give their places back. Safe to call twice."""
        super().shutdown()
        if not self._ended:
            self._ended = True
            remove_placement_group(self._group)
            self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_connection:
            ray.shutdown()


class RayWorkerHandle:
    """Speaks to one actor.

    Args:
        rank: Of the worker.
        actor: It.
        started: Reference to the end of its start, with which its errors come.
    """

    def __init__(self, rank: int, actor: Any, started: Any) -> None:
        self._rank = rank
        self._actor = actor
        self._lock = threading.Lock()
        self._death: str | None = None
        self._is_stopping = False
        # A call, what its reply is known by, and whether it tells how far it is.
        self._calls: SimpleQueue[tuple[Call | None, Any, bool]] = SimpleQueue()
        self._calls.put((None, started, False))
        self._reader = threading.Thread(
            target=self._read_replies, name=f"octavo-ray-replies-{rank}", daemon=True
        )
        self._reader.start()
        # A call that lasts as long as the actor: so its end is noticed while nobody asks.
        self._lifetime = threading.Thread(
            target=self._await_end,
            args=(actor.outlive.remote(),),
            name=f"octavo-ray-life-{rank}",
            daemon=True,
        )
        self._lifetime.start()

    @property
    def death(self) -> str | None:
        """How the worker ended; None while it lives."""
        with self._lock:
            return self._death

    def start(self, call: Call, command: messages.Command) -> None:
        """Send a command whose reply `call` gets; an error, if the worker is gone."""
        death = self.death
        if death is not None:
            call.fail(EngineDeadError(death))
        else:
            reference = self._actor.handle.remote(messages.encode(command))
            takes_long = isinstance(command, messages.LoadModel | messages.WarmUp)
            self._calls.put((call, reference, takes_long))

    def send(self, command: bytes) -> None:
        """Send an encoded command that is not answered."""
        if self._is_stopping:
            raise EngineDeadError("the executor has been shut down")
        self._actor.handle.remote(command)

    def kill(self) -> None:
        """End the worker at once. Any thread may call this."""
        ray.kill(self._actor, no_restart=True)

    def stop(self) -> None:
        """End the worker, without waiting. Safe to call twice."""
        if not self._is_stopping:
            self._is_stopping = True
            self._declare_dead("the executor has been shut down")
            self.kill()

    def end(self) -> None:
        """Wait until the worker is gone. Safe to call twice."""
        self._calls.put((None, None, False))
        self._reader.join()
        self._lifetime.join()

    def _read_replies(self) -> None:
        """Hand replies to the calls they answer, in order, until told to end."""
        while True:
            call, reference, takes_long = self._calls.get()
            if reference is None:
                return
            try:
                if call is not None and takes_long:
                    self._pass_on_progress(call, reference)
                data = ray.get(reference)
                if call is not None:
                    call.finish(messages.decode_reply(data))
            except Exception as error:
                self._declare_dead(f"worker {self._rank} has ended: {_first_line(error)}")
                if call is not None:
                    call.fail(EngineDeadError(self.death or ""))

    def _pass_on_progress(self, call: Call, reference: Any) -> None:
        """Ask how far a call is until its reply is there."""
        is_ready = False
        while not is_ready:
            ready, _ = ray.wait([reference], timeout=PROGRESS_INTERVAL)
            is_ready = bool(ready)
            data = ray.get(self._actor.take_progress.remote())
            if data is not None:
                progress = messages.decode_reply(data)
                assert isinstance(progress, messages.Progress)
                call.report(progress)

    def _await_end(self, reference: Any) -> None:
        try:
            ray.get(reference)
        except Exception as error:
            self._declare_dead(f"worker {self._rank} has ended: {_first_line(error)}")

    def _declare_dead(self, how: str) -> None:
        with self._lock:
            if self._death is None:
                self._death = how


class RayWorker:
    """The actor: carries out commands, one after the other."""

    def __init__(self) -> None:
        self._progress: bytes | None = None

    def host(self) -> str:
        """Return the address of the machine within the cluster."""
        return str(ray.util.get_node_ip_address())

    def free_port(self, host: str) -> int:
        """Find a port that nobody listens on."""
        with socket.socket() as sock:
            sock.bind((host, 0))
            port: int = sock.getsockname()[1]
            return port

    def start(
        self, rank: int, config: bytes, spec: bytes, rendezvous: str, workers_here: int
    ) -> None:
        """Make the worker.

        Args:
            rank: Index among the workers.
            config: An `EngineConfig` in msgpack.
            spec: A `ModelSpec` in msgpack.
            rendezvous: Where the workers find each other.
            workers_here: How many are on this machine.
        """
        from octavo_worker.executors.command_handler import CommandHandler

        decoded = msgspec.msgpack.decode(config, type=EngineConfig)
        self._handler = CommandHandler(
            rank, decoded, spec, rendezvous, self._keep_progress, workers_here
        )

    def handle(self, command: bytes) -> bytes | None:
        """Carry out one encoded command, and encode its reply."""
        reply = self._handler.handle(messages.decode_command(command))
        return None if reply is None else messages.encode(reply)

    def take_progress(self) -> bytes | None:
        """Return how far a command is, encoded, unless that was returned already."""
        progress, self._progress = self._progress, None
        return progress

    def _keep_progress(self, progress: messages.Progress) -> None:
        self._progress = messages.encode(progress)

    def outlive(self) -> None:
        """Last as long as the actor."""
        threading.Event().wait()


def _connect() -> None:
    """Connect to the cluster that there is, or start one on this machine."""
    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError:
        logger.info("There is no Ray cluster; starting one on this machine")
        ray.init(address="local", include_dashboard=False, log_to_driver=True)
        # Its agents would take a minute to notice that we are gone.
        before_orphan_ends(_kill_descendants)


def _kill_descendants() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()


def _bundle(config: EngineConfig) -> dict[str, float]:
    """Return what one worker takes of the cluster."""
    threads = config.device.cpu_threads or config.parallel.world_size
    bundle = {"CPU": float(max(threads // config.parallel.world_size, 1))}
    if config.device.device != "cpu" and ray.cluster_resources().get("GPU", 0):
        bundle["GPU"] = 1.0
    return bundle


def _place(config: EngineConfig) -> PlacementGroup:
    """Reserve the workers' places, on as few machines as they fit on.

    Raises:
        ConfigError: There is no room.
    """
    size = config.parallel.world_size
    bundle = _bundle(config)
    group = placement_group([bundle] * size, strategy="PACK")
    if group.wait(PLACEMENT_TIMEOUT):
        return group
    remove_placement_group(group)
    wanted = ", ".join(f"{size} x {count:g} {name}" for name, count in bundle.items())
    there = {name: ray.cluster_resources().get(name, 0) for name in bundle}
    free = {name: ray.available_resources().get(name, 0) for name in bundle}
    raise ConfigError(
        f"tensor_parallel_size times pipeline_parallel_size is {size}, for which the Ray cluster "
        f"would have to have {wanted} free, each on one machine; it has "
        f"{', '.join(f'{free[name]:g} of {there[name]:g} {name}' for name in bundle)}.",
        field="tensor_parallel_size",
    )


def _start_actor(group: PlacementGroup, rank: int, config: EngineConfig) -> Any:
    bundle = _bundle(config)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    # Commands are carried out one by one; what goes on beside them has threads of its own.
    methods = {
        "outlive": ray.method(concurrency_group="life")(RayWorker.outlive),
        "take_progress": ray.method(concurrency_group="progress")(RayWorker.take_progress),
    }
    actor_class = type("RayWorker", (RayWorker,), methods)
    remote = ray.remote(concurrency_groups={"life": 1, "progress": 1})(actor_class)
    return remote.options(
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0),
        scheduling_strategy=strategy,
        name=None,
    ).remote()


def _rendezvous(first: Any, hosts: Sequence[str]) -> str:
    """Choose where the workers meet: on the machine of the first, or on the only one."""
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    return f"tcp://{host}:{ray.get(first.free_port.remote(host))}"


def _nodes(group: PlacementGroup) -> list[str]:
    """Return the machine of each worker."""
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return [by_bundle[index] for index in range(len(by_bundle))]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
