"""Workers as actors of a Ray cluster of two nodes, both on this machine.

It takes a minute and hundreds of megabytes, so it has a session of its own: `nox -s ray`.
"""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest

from octavo_core.errors import ConfigError, EngineDeadError
from octavo_core.model_spec import read_model_spec
from octavo_worker.executors import create_executor
from support import engine_texts, same_texts
from support.server import Server, children_of, command_line, is_running

if not os.environ.get("OCTAVO_RAY_TESTS"):
    pytest.skip("runs in `nox -s ray`", allow_module_level=True)
ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from octavo_core.config import resolve_config  # noqa: E402

pytestmark = pytest.mark.timeout(420)

STORE = 100 << 20  # bytes of shared memory of each node

GONE_WITHIN = 5.0
"""Seconds after which nothing of a server is left whose front was killed, as docs/reliability.md
has it."""

PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_health_check_initial_delay_ms": "120000",
    "RAY_health_check_timeout_ms": "60000",
}
"""On a busy machine a node's Python processes need a minute to start, and Ray gives up before."""

TRIES = 4
"""Of bringing a node up: it awaits its agents, which are Python processes, for 15 s at most."""


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENCE.items():
            patch.setenv(name, value)
        cluster = cluster_utils.Cluster(initialize_head=False)
        try:
            for _ in range(2):
                _add_node(cluster)
            cluster.wait_for_nodes(timeout=120)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _add_node(cluster):
    for tries_left in reversed(range(TRIES)):
        try:
            cluster.add_node(
                num_cpus=1,
                object_store_memory=STORE,
                include_dashboard=False,
                include_log_monitor=False,
            )
        except Exception as error:
            if not tries_left or "timed out during startup" not in str(error):
                raise
        else:
            return


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return same_texts.save_model(tmp_path_factory.mktemp("llama"))


def _config(folder, **values):
    defaults = {
        "device": "cpu",
        "cpu_threads": 2,
        "kv_cache_memory": 1 << 22,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
    }
    return resolve_config(defaults | values).replace("the test", model_path=str(folder))


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory):
    """The texts of a server that knows nothing of Ray."""
    return same_texts.texts(folder, tmp_path_factory.mktemp("one") / "log")


@pytest.mark.parametrize(
    ("flags", "num_workers"),
    [((), 1), (("--tensor-parallel-size", "2"), 2), (("--pipeline-parallel-size", "2"), 2)],
    ids=["one worker", "TP2", "PP2"],
)
def test_the_same_texts_over_two_nodes(cluster, folder, expected, tmp_path, flags, num_workers):
    ray.init(cluster.address, ignore_reinit_error=True, log_to_driver=False)
    flags = ("--distributed-executor-backend", "ray", *flags)
    with same_texts.running(folder, tmp_path / "log", *flags) as server:
        groups = ray.util.placement_group_table().values()
        (nodes,) = (g["bundles_to_node_id"] for g in groups if g["state"] == "CREATED")
        assert len(set(nodes.values())) == len(nodes) == num_workers
        assert same_texts.ask(server.url) == expected


def test_the_death_of_an_actor_ends_the_engine(cluster, folder):
    config = _config(folder, distributed_executor_backend="ray", tensor_parallel_size=2)
    stages = []
    engine = engine_texts.start_engine(config, lambda stage, progress: stages.append(stage))
    try:
        assert "loading weights" in stages
        engine.check_health()
        killed = engine._executor._workers[1]
        killed.kill()
        deadline = time.monotonic() + 30
        while killed.death is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(EngineDeadError, match="worker 1 has ended"):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            engine_texts.run(engine, engine_texts.requests())
    finally:
        engine.shutdown()


def test_no_room(cluster, folder, monkeypatch):
    monkeypatch.setattr("octavo_worker.executors.ray_cluster.PLACEMENT_TIMEOUT", 2.0)
    config = _config(folder, distributed_executor_backend="ray", tensor_parallel_size=6)
    with pytest.raises(ConfigError, match=r"6 x 1 CPU free, each .*; it has 2 of 2 CPU"):
        create_executor(config, read_model_spec(folder))


def test_a_killed_front_leaves_no_actor(cluster, folder, tmp_path):
    """The engine ends with its front, and Ray ends the actors of an engine that is gone."""
    flags = ("--device", "cpu", "--cpu-threads", "2", "--kv-cache-memory", "4MiB")
    flags += ("--max-model-len", "128", "--max-num-batched-tokens", "128")
    flags += ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2")
    server = Server(str(folder), *flags, log=tmp_path / "log")
    pids = []
    try:
        server.wait_until_ready()
        actors = _actors(cluster)
        assert len(actors) == 2
        pids = [*server.processes, *actors]
        assert all(map(is_running, pids))
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
            server.process.kill()
            started = time.monotonic()
        while left := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() - started < GONE_WITHIN, left
            time.sleep(0.02)
        print(f"gone after {time.monotonic() - started:.2f} s")
        _wait_for_room(cluster)  # for the next engine
    finally:
        for pid in filter(is_running, {*pids, server.process.pid}):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()


def _wait_for_room(cluster):
    ray.init(address=cluster.address)
    try:
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU", 0) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        ray.shutdown()


def _actors(cluster):
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    children = [pid for raylet in raylets for pid in children_of(raylet)]
    return [pid for pid in children if command_line(pid).startswith("ray::RayWorker")]
