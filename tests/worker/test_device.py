import os
import subprocess
import sys

import msgspec
import pytest
import torch

from octavo_core.config import resolve_config
from octavo_core.errors import ConfigError
from octavo_core.model_spec import read_model_spec
from octavo_kernels.cpu.threads import MAX_THREADS, get_num_threads, set_num_threads
from octavo_worker import cpu_binding
from octavo_worker.cpu_binding import (
    bind_worker,
    format_cpu_list,
    num_usable_cpus,
    numa_nodes,
    parse_cpu_list,
    share_cpus,
)
from octavo_worker.device import choose_dtype, resolve_device, resolve_dtype, use_cpu_threads
from octavo_worker.loading import WeightForm, load_weights, room
from octavo_worker.memory import MemorySnapshot, available_cpu_memory
from octavo_worker.worker import Worker
from support.tiny_families import save_family

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "kind", "expected"),
    [
        ("auto", "bfloat16", "cpu", torch.float32),
        ("auto", None, "cpu", torch.float32),
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16),
        ("auto", "float32", "cuda", torch.bfloat16),
        ("auto", None, "cuda", torch.bfloat16),
        ("float32", "bfloat16", "cuda", torch.float32),
        ("float16", None, "cpu", torch.float16),
    ],
)
def test_types(wanted, checkpoint, kind, expected):
    assert resolve_dtype(wanted, checkpoint, torch.device(kind)) == expected


def test_devices():
    assert resolve_device(resolve_config({"device": "cpu"}), 0) == torch.device("cpu")
    expected = torch.device("cuda", 1) if torch.cuda.is_available() else torch.device("cpu")
    assert resolve_device(resolve_config({}), 1) == expected


@pytest.fixture
def _threads_as_before():
    """What comes after in this process would else have hundreds of threads."""
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.mark.usefixtures("_threads_as_before")
def test_threads():
    assert use_cpu_threads(1) == torch.get_num_threads() == 1
    assert use_cpu_threads(None) == torch.get_num_threads() == num_usable_cpus()


@pytest.mark.usefixtures("_threads_as_before")
def test_a_container_grants_fewer_threads_than_there_are_cores(monkeypatch, caplog):
    monkeypatch.setattr("octavo_core.cgroup.cpu_quota", lambda: 0.3)
    assert num_usable_cpus() == use_cpu_threads(None) == 1
    monkeypatch.setattr("octavo_core.cgroup.cpu_quota", lambda: 1000.0)
    assert num_usable_cpus() == len(os.sched_getaffinity(0))
    assert use_cpu_threads(None, num_workers=1000) == 1
    assert not caplog.records
    assert use_cpu_threads(MAX_THREADS + 1) == MAX_THREADS
    assert f"cpu_threads is {MAX_THREADS + 1}, but this process may use" in caplog.text


def test_memory_is_within_the_containers_limit(monkeypatch):
    monkeypatch.setattr("octavo_core.cgroup.memory_left", lambda: None)
    assert available_cpu_memory() > 4000
    monkeypatch.setattr("octavo_core.cgroup.memory_left", lambda: 4000)
    assert available_cpu_memory() == 4000


@pytest.mark.skipif(sys.platform != "linux", reason="others do not limit a process's addresses")
def test_free_memory_is_within_the_limit_of_addresses():
    command = """
import resource, psutil, octavo_worker.memory as memory
before = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (before + (100 << 20),) * 2)
print(memory.available_cpu_memory())
"""
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True)
    assert 0 < int(found.stdout) <= 100 << 20


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "kind", "capability", "expected", "reason"),
    [
        ("auto", "bfloat16", "cpu", None, torch.float32, "a CPU computes in float32"),
        ("auto", "float32", "cpu", None, torch.float32, ""),
        ("bfloat16", "float32", "cpu", None, torch.bfloat16, "as asked"),
        ("auto", "bfloat16", "cuda", (9, 0), torch.bfloat16, ""),
        ("auto", "float32", "cuda", (9, 0), torch.bfloat16, "half the memory, twice the speed"),
        ("auto", None, "cuda", None, torch.bfloat16, "what most checkpoints have"),
        ("auto", "bfloat16", "cuda", (7, 5), torch.float16, "compute capability 7.5, and bfloat16"),
        ("float32", "bfloat16", "cuda", (7, 5), torch.float32, "as asked"),
    ],
)
def test_a_type_that_differs_comes_with_a_reason(
    wanted, checkpoint, kind, capability, expected, reason
):
    chosen = choose_dtype(wanted, checkpoint, torch.device(kind), capability)
    assert chosen.dtype == expected
    assert reason in chosen.reason
    assert bool(reason) == bool(chosen.reason)


def test_bfloat16_is_refused_by_a_gpu_without_it():
    with pytest.raises(ConfigError, match=r"capability 8\.0, and cuda has 7\.5") as caught:
        choose_dtype("bfloat16", None, torch.device("cuda"), (7, 5))
    assert caught.value.field == "dtype"


def test_the_log_says_type_and_reason(make_config, tiny_folder, caplog):
    caplog.set_level("INFO")
    spec = msgspec.structs.replace(read_model_spec(tiny_folder), dtype="bfloat16")
    Worker(make_config(tiny_folder), spec).init_device()
    assert (
        "Running on cpu in float32 (dtype is auto from default; the checkpoint says bfloat16: "
        "a CPU computes in float32)"
    ) in caplog.text


def test_a_gpu_with_too_little_free_memory_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    snapshot = MemorySnapshot.take(torch.device("cuda"))
    assert snapshot.request(0.5, "cuda:0") == 40 << 30
    with pytest.raises(ConfigError, match=r"0\.92 asks for 73\.60 GiB .* only 60\.00 GiB"):
        snapshot.request(0.92, "cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (45 << 30, 80 << 30))
    assert snapshot.taken_since(torch.device("cuda")) == 15 << 30


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    make_config, tiny_folder, monkeypatch
):
    monkeypatch.setattr("octavo_core.cgroup.memory_left", lambda: 300_000)
    for form, advice in (("none", "auto or q4_0"), ("auto", "q4_0, or")):
        worker = Worker(make_config(tiny_folder, quantization=form), read_model_spec(tiny_folder))
        worker.init_device()
        with pytest.raises(
            ConfigError, match=rf"weights take 0\.00 GiB.*use --quantization {advice}"
        ):
            worker.load_model(lambda *_: pytest.fail("a weight was read"))


@pytest.mark.parametrize("form", ["none", "auto", "q8_0", "w8a8"])
def test_weights_take_what_they_were_said_to(form, tmp_path, monkeypatch):
    """Within a tenth: rows are filled up to whole groups."""
    save_family("llama", tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    said = []
    monkeypatch.setattr(room, "free_memory", lambda device: 1 << 40)
    counted = room.kept_bytes
    monkeypatch.setattr(room, "kept_bytes", lambda *a: said.append(counted(*a)) or said[-1])
    form = WeightForm(torch.float32, form, for_cpu_kernels=form == "none")
    weights = load_weights(read_model_spec(tmp_path), tmp_path, form, CPU, lambda *_: None)
    taken = sum(
        weight.nbytes if isinstance(weight, torch.Tensor) else sum(p.num_bytes for p in weight)
        for weight in weights.values()
    )
    assert taken * 0.9 <= sum(said) <= taken


# Where threads run


def test_lists_of_cpus():
    assert parse_cpu_list("0-3,8\n") == [0, 1, 2, 3, 8]
    assert parse_cpu_list("\n") == []
    assert format_cpu_list([8, 0, 1, 2, 3]) == "0-3,8"
    assert format_cpu_list([]) == ""


def test_nodes_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_binding, "NODES", tmp_path)
    assert numa_nodes() == [sorted(os.sched_getaffinity(0))]
    for name, cpus in (("node0", "0-1"), ("node1", "2-3"), ("node10", "4"), ("node2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    (tmp_path / "possible").write_text("0-10")
    assert numa_nodes() == [[0, 1], [2, 3], [4]]


NODES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("usable", "workers", "expected"),
    [
        (range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (range(8), 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (range(8), 3, [[0, 1], [2, 3], [4, 5]]),
        ([2, 3, 4, 5], 2, [[2, 3], [4, 5]]),
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),  # the container has one node
        ([0, 4, 5, 6], 2, [[0, 4], [5, 6]]),  # shares that no node has for both
        ([0], 2, [[0], [0]]),
    ],
)
def test_workers_get_cpus_of_their_own_and_of_one_node(usable, workers, expected):
    found = [share_cpus(list(usable), NODES, index, workers) for index in range(workers)]
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "here", "threads", "expected"),
    [
        ({"tensor_parallel_size": 2}, 2, 4, [4, 5, 6, 7]),
        ({"distributed_executor_backend": "mp"}, 1, 4, [0, 1, 2, 3]),
        ({"distributed_executor_backend": "mp"}, 1, 8, []),  # it wants both nodes
        ({}, 1, 4, []),  # in the engine's process
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, 4, 2, []),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, 2, 2, []),
        ({"tensor_parallel_size": 8}, 8, 1, []),
    ],
)
def test_which_workers_are_bound(settings, here, threads, expected, monkeypatch):
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    monkeypatch.setattr(cpu_binding, "usable_cpus", lambda: list(range(8)))
    monkeypatch.setattr(cpu_binding, "numa_nodes", lambda: NODES)
    rank = 1 if here == 2 else 0
    assert bind_worker(resolve_config(settings), rank, here, threads) == expected
    assert bound == ([expected] if expected else [])
