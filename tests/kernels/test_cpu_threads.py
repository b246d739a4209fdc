"""The team of threads: every chunk once, whatever the number of threads and callers."""

import multiprocessing
import threading

import numpy as np
import pytest

pytest.importorskip("numba")

from octavo_kernels.cpu import threads
from octavo_kernels.machine import count_chunks, count_chunks_beside_idlers


@pytest.fixture(autouse=True)
def _default_threads():
    yield
    threads.set_num_threads(threads.default_num_threads())


def _count(rounds, chunks, run=count_chunks, *others):
    counts, ranks = np.zeros(chunks + 1, np.int64), np.zeros(8 * threads.MAX_THREADS, np.int64)
    run(rounds, chunks, counts.ctypes.data, ranks.ctypes.data, *others)
    assert counts[chunks] == 0, "a chunk was taken before the round before it was over"
    return counts[:chunks], int(ranks.sum())


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_chunk_is_taken_once_a_round_and_no_round_begins_early(num_threads):
    threads.set_num_threads(num_threads)
    assert threads.get_num_threads() == num_threads
    for rounds, chunks in [(1, 1), (200, 3), (20, 1000), (20_000, 2)]:
        counts, ranks = _count(rounds, chunks)
        assert (counts == rounds).all()
        assert 1 <= ranks <= num_threads


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_that_do_nothing_hold_nobody_up_and_find_nothing_later(num_threads):
    threads.set_num_threads(num_threads)
    for rounds, chunks in [(1, 1), (200, 3), (20, 1000)]:
        words = np.zeros(2, np.int64)
        counts, ranks = _count(rounds, chunks, count_chunks_beside_idlers, words.ctypes.data)
        assert (counts == rounds).all()
        assert ranks == num_threads
        assert words.tolist() == [num_threads, 1]


def test_a_kernel_without_chunks_needs_no_second_thread():
    for rounds in (0, 3):
        for _ in range(300):
            counts, ranks = _count(rounds, 0)
            assert counts.sum() == 0
            assert 1 <= ranks <= threads.get_num_threads()


def test_the_number_stays_that_of_the_team_when_the_process_may_use_fewer_cores(monkeypatch):
    threads.set_num_threads(3)  # what is left of a team that no number was asked of
    monkeypatch.setattr(threads, "_num_threads", None)
    monkeypatch.setattr(threads, "_first_default", None, raising=False)
    monkeypatch.setenv("OCTAVO_CPU_THREADS", "3")
    assert threads.team().num_threads == 3
    monkeypatch.setenv("OCTAVO_CPU_THREADS", "1")
    assert threads.default_num_threads() == 1
    assert threads.get_num_threads() == 3


def test_no_more_threads_run_a_kernel_than_its_caller_was_told_of():
    asked, changed, ranks = threading.Event(), threading.Event(), []

    def call():
        for _ in range(2):
            threads.get_num_threads()
            asked.set()
            changed.wait(60)
            words = np.zeros(2, np.int64)  # all threads of the team take part
            counts, num_ranks = _count(3, 4, count_chunks_beside_idlers, words.ctypes.data)
            assert (counts == 3).all()
            ranks.append(num_ranks)

    threads.set_num_threads(1)
    caller = threading.Thread(target=call)
    caller.start()
    assert asked.wait(60)
    threads.set_num_threads(4)
    changed.set()
    caller.join()
    assert ranks == [1, 4]


def test_alone_means_the_calling_thread():
    counts, ranks = _count(7, 10, count_chunks.alone)
    assert (counts == 7).all()
    assert ranks == 1


def test_callers_of_several_python_threads_take_turns():
    wrong = []

    def call():
        for _ in range(50):
            counts, _ = _count(5, 20)
            if not (counts == 5).all():
                wrong.append(counts)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def _count_in_child(queue):
    queue.put(_count(3, 50)[0].tolist())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is the test
def test_a_forked_child_starts_its_own_team():
    _count(1, 1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_count_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == [3] * 50
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("count", [0, -1, 257])
def test_numbers_of_threads_that_make_no_sense_are_refused(count):
    with pytest.raises(ValueError, match=f"num_threads is {count}; it must be between 1 and 256"):
        threads.set_num_threads(count)
