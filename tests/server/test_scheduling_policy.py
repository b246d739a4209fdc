"""``--scheduling-policy``, from the body's fields to the order of the answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

PATH = "/v1/completions"
SLOW = "slow" + "." * 30  # 20 ms a step, over 0.5 s in all


def order_of_answers(front: Any, bodies: list[dict[str, Any]]) -> list[int]:
    """Send bodies one after the other while the first one occupies the only slot."""
    ended: list[int] = []

    def send(number: int) -> None:
        response = front.post(PATH, {"prompt": SLOW, "max_tokens": 30, **bodies[number]})
        assert response.status_code == 200, response.text
        ended.append(number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # they get in line in this order
    for thread in threads:
        thread.join()
    return ended


def test_by_priority_the_important_pass_those_that_wait(start_front: Any) -> None:
    front = start_front(scheduling_policy="priority", max_num_seqs=1).wait_ready()
    bodies = [{}, {"priority": 5}, {"priority": -5}, {"priority": 0}]
    assert order_of_answers(front, bodies) == [0, 2, 3, 1]
    for edge in (2**63 - 1, -(2**63)):
        assert front.post(PATH, {"prompt": "x", "priority": edge}).status_code == 200


def test_by_fair_share_a_users_flood_delays_no_other_user(start_front: Any) -> None:
    front = start_front(scheduling_policy="fair_share", max_num_seqs=1).wait_ready()
    flood = {"user": "flood"}
    bodies = [flood, flood, flood, {"safety_identifier": "light", "user": "flood"}]
    assert order_of_answers(front, bodies) == [0, 3, 1, 2]
    error = front.post(PATH, {"prompt": "x", "priority": 1}).json()["error"]
    assert "fair_share" in error["message"]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_first_come_first_served_knows_no_priority(front: Any, path: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    error = front.post(path, {**body, "priority": 1})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "priority"
    assert "--scheduling-policy priority" in error.json()["error"]["message"]
    assert front.post(path, {**body, "priority": 0, "user": "me"}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 2**63),
        ("priority", -(2**63) - 1),
        ("priority", "1"),
        ("priority", 0.5),
        ("priority", True),
        ("user", "x" * 1025),
        ("user", 5),
        ("safety_identifier", []),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(front: Any, field: str, value: Any) -> None:
    response = front.post(PATH, {"prompt": "x", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert httpx.get(front.url + "/health").status_code == 200


def test_an_unknown_policy_ends_the_start_with_the_known_ones(start_front: Any) -> None:
    front = start_front(scheduling_policy="lottery")
    assert front.process.wait(timeout=30) != 0
    assert "scheduling_policy is 'lottery'" in front.stderr
    assert "fcfs, priority, fair_share" in front.stderr
