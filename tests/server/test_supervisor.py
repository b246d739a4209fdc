"""How many crashes are too many."""

from __future__ import annotations

from typing import Any

from octavo_server.supervisor import CRASH_WINDOW, MAX_CRASHES, Supervisor


def supervisor_at(times: list[float]) -> Supervisor:
    spawn: Any = None
    return Supervisor(spawn, iter(times).__next__)


def test_the_third_crash_within_ten_minutes_is_the_last() -> None:
    supervisor = supervisor_at([0.0, 300.0, CRASH_WINDOW])
    assert supervisor.note_crash() is None
    assert supervisor.note_crash() is None
    reason = supervisor.note_crash()
    assert reason is not None
    assert f"{MAX_CRASHES} times within 10 minutes" in reason
    assert supervisor.num_restarts == 2


def test_crashes_that_are_long_ago_do_not_count() -> None:
    supervisor = supervisor_at([index * (CRASH_WINDOW / 2 + 1) for index in range(20)])
    assert [supervisor.note_crash() for _ in range(20)] == [None] * 20


def test_the_first_crash_is_the_last_where_nothing_is_to_be_replaced() -> None:
    spawn: Any = None
    supervisor = Supervisor(spawn, restarts=False)
    assert "--no-engine-restart" in str(supervisor.note_crash())
    assert supervisor.num_restarts == 0
