"""Pages of the KV cache that are present before a step needs them, in real mappings."""

import ctypes
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_kernels import HUGE_PAGE, map_memory, populate_memory
from octavo_worker import page_reserve
from octavo_worker.executors import create_executor
from octavo_worker.kv_caches import KVPool, allocate_kv_caches, allocate_kv_pool, memory_of
from octavo_worker.page_reserve import QUIET, PageReserve

NUM_BLOCKS = 5000  # of 8 KiB: 39.06 MiB, and so no multiple of a huge page
RESERVE = 5 * HUGE_PAGE


def _can_populate():
    memory = map_memory(HUGE_PAGE)
    try:
        populate_memory(memory.data_ptr(), len(memory))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _can_populate(), reason="the system takes pages on use only")


@pytest.fixture(autouse=True)
def _small_reserve(monkeypatch):
    monkeypatch.setattr(page_reserve, "RESERVE", RESERVE)


@pytest.fixture
def pool(tiny_folder):
    return allocate_kv_pool(read_model_spec(tiny_folder), NUM_BLOCKS, 16, torch.float32)


def _present(storage):
    """How many bytes of the pages that a mapping is in are in memory."""
    page = 4096
    num_pages = -(-storage.nbytes() // page)
    found = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    address, num_bytes = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
    assert libc.mincore(address, num_bytes, found) == 0
    return page * sum(present & 1 for present in found)


def _wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_ready(storage, num_bytes):
    def condition():
        present = _present(storage)
        assert present <= num_bytes
        return present == num_bytes

    return condition


def _threads():
    return {thread for thread in threading.enumerate() if thread.name == "octavo-kv-pages"}


def _start(pool, num_blocks=NUM_BLOCKS, workers_here=1):
    """Return a reserve, and its thread."""
    before = _threads()
    reserve = PageReserve(pool, num_blocks, workers_here)
    (thread,) = _threads() - before
    return reserve, thread


def test_pages_are_there_ahead_of_the_highest_block_and_contents_stay(pool):
    (storage,) = memory_of(pool.caches)
    tensors = [tensor for cache in pool.caches for tensor in cache]
    for number, tensor in enumerate(tensors, 1):
        tensor[2 * pool.block_step] = number  # of a block of the first page
    reserve, _ = _start(pool)
    reserve.end_step(0)
    _wait_for(_is_ready(storage, RESERVE))
    reserve.end_step(1000)  # 7.8 MiB; with the reserve 17.8
    _wait_for(_is_ready(storage, 8 * HUGE_PAGE))
    reserve.end_step(20)  # lower ones change nothing
    reserve.end_step(4000)  # skips some of the pages; 31.25 MiB
    everything = -(-storage.nbytes() // 4096) * 4096
    _wait_for(_is_ready(storage, everything - 7 * HUGE_PAGE))
    for number, tensor in enumerate(tensors, 1):
        blocks = tensor[:: pool.block_step]
        assert (blocks[2] == number).all()
        assert blocks.sum() == blocks[2].sum()


def test_nothing_beyond_the_pool_is_asked_for(pool, monkeypatch):
    (storage,) = memory_of(pool.caches)
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    asked = []

    def record(address, num_bytes):
        asked.append((address, address + num_bytes))
        populate_memory(address, num_bytes)

    monkeypatch.setattr(page_reserve, "populate_memory", record)
    monkeypatch.setattr(page_reserve, "RESERVE", 1 << 40)
    reserve, _ = _start(pool)
    reserve.end_step(0)
    _wait_for(lambda: asked and asked[-1][1] == last)
    assert [start for start, _ in asked] == list(range(first, last, HUGE_PAGE))
    assert [end for _, end in asked] == [start for start, _ in asked[1:]] + [last]
    reserve.end_step(NUM_BLOCKS)
    _wait_for(lambda: reserve.take_page() is None)
    assert asked[-1][1] == last


def test_workers_share_the_reserve_and_so_do_layers_that_lie_apart(tiny_folder, monkeypatch):
    spec, cpu = read_model_spec(tiny_folder), torch.device("cpu")
    pool = KVPool(allocate_kv_caches(spec, NUM_BLOCKS, 16, torch.float32, cpu))
    storages = memory_of(pool.caches)
    assert len(storages) == 4
    monkeypatch.setattr(page_reserve, "RESERVE", 22 * HUGE_PAGE)  # 2.75 for each of a worker's
    reserve, _ = _start(pool, workers_here=2)
    reserve.end_step(0)
    for storage in storages:
        _wait_for(_is_ready(storage, 2 * HUGE_PAGE))


def test_memory_that_has_no_page_of_its_own_is_left_alone(tiny_folder):
    pool = allocate_kv_pool(read_model_spec(tiny_folder), 7, 16, torch.float32)
    reserve, _ = _start(pool, 7)
    reserve.end_step(0)
    _wait_for(lambda: reserve.take_page() is None)


def test_nothing_is_taken_while_a_step_runs_nor_right_after_it(pool, monkeypatch):
    (storage,) = memory_of(pool.caches)
    reserve, _ = _start(pool)
    assert reserve.take_page() == QUIET  # the worker is not ready yet
    reserve.end_step(0)
    _wait_for(_is_ready(storage, RESERVE))
    reserve.begin_step()
    assert reserve.take_page() == QUIET
    monkeypatch.setattr(page_reserve, "QUIET", 1000.0)
    reserve.end_step(1000)
    assert 0 < reserve.take_page() <= 1000
    assert _present(storage) == RESERVE


def test_the_thread_ends_with_the_reserve(pool):
    reserve, thread = _start(pool)
    reserve.end_step(0)
    ended = weakref.ref(reserve)
    del reserve
    thread.join(60)
    assert not thread.is_alive()
    assert ended() is None


def test_memory_stays_mapped_until_the_page_in_hand_is_taken(pool, monkeypatch):
    begun, may_end, errors = threading.Event(), threading.Event(), []

    def populate_late(address, num_bytes):
        begun.set()
        may_end.wait(60)
        try:
            populate_memory(address, num_bytes)
        except OSError as error:
            errors.append(error)

    monkeypatch.setattr(page_reserve, "populate_memory", populate_late)
    (storage,) = memory_of(pool.caches)
    reserve, thread = _start(pool)
    del storage
    reserve.end_step(0)
    assert begun.wait(60)
    kept = weakref.ref(reserve)
    del reserve
    assert kept() is not None
    may_end.set()
    thread.join(60)
    assert not thread.is_alive()
    assert kept() is None
    assert not errors


def test_where_the_system_can_not_the_thread_ends_and_steps_go_on(pool, monkeypatch):
    def refuse(address, num_bytes):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(page_reserve, "populate_memory", refuse)
    reserve, thread = _start(pool)
    reserve.end_step(0)
    thread.join(60)
    assert not thread.is_alive()
    for num_blocks in (1, 2000, 3000):
        reserve.begin_step()
        reserve.end_step(num_blocks)
    assert reserve._calls.qsize() == 1  # and nothing piles up


def test_an_executor_fills_its_pool_while_idle_and_ends_the_thread(
    make_config, tiny_folder, drive, make_llama
):
    before = _threads()
    executor = create_executor(make_config(tiny_folder), read_model_spec(tiny_folder))
    try:
        executor.load_model(lambda stage, progress: None)
        executor.determine_available_memory()
        executor.initialize_kv_cache(4000)
        (thread,) = _threads() - before
        worker = executor._running
        (storage,) = memory_of(worker.runner.kv_caches)
        assert _present(storage) == 0  # before it is ready
        executor.warm_up(lambda stage, progress: None)
        _wait_for(_is_ready(storage, RESERVE))
        prompt = [5, 17, 200, 3, 88]
        expected = make_llama().generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
        tokens = drive.generate(executor, prompt, 20, block_ids=range(2900, 2905))
        assert tokens == expected.tolist()
        assert worker.runner.batch.num_blocks_reached == 2905
        executor.execute_model(drive.step([]))
        assert worker._page_reserve.take_page() == QUIET  # its sampling is part of a step
        executor.sample_tokens(None)
        used = storage.nbytes() // 4000 * 2905 // HUGE_PAGE * HUGE_PAGE
        _wait_for(lambda: _present(storage) >= RESERVE + storage.nbytes() - used)
    finally:
        executor.shutdown()
    thread.join(60)
    assert not thread.is_alive()


_FORK = """
import os, sys, threading, torch
from octavo_core.model_spec import read_model_spec
from octavo_worker.kv_caches import allocate_kv_pool
from octavo_worker.page_reserve import PageReserve

pool = allocate_kv_pool(read_model_spec(sys.argv[1]), 5000, 16, torch.float32)
reserve = PageReserve(pool, 5000)
child = os.fork()
for number in range(100):
    reserve.begin_step()
    reserve.end_step(number)
if child:
    _, status = os.waitpid(child, 0)
    print(status, threading.active_count())
else:
    del reserve
    os._exit(threading.active_count())
"""


@pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="there is no fork")
def test_a_fork_has_no_such_thread_and_waits_for_none(tiny_folder):
    command = [sys.executable, "-W", "ignore", "-c", _FORK, str(tiny_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, [str(1 << 8), "2"]), done.stderr
