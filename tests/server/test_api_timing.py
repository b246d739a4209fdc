from __future__ import annotations

import re
from typing import Any

import pytest

from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server.api.timing import timing_of
from octavo_server.metrics import ChoiceProgress, ServingMetrics
from octavo_server.request_output import OutputDelta

ROUTES = {
    "/v1/completions": {"prompt": "slow and long enough to be cached in two blocks"},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "slow and long enough to be cached in blocks"}]
    },
}
NAMES = {"queue_seconds", "prefill_seconds", "decode_seconds", "preemptions", "cached_tokens"}


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_tells_its_times_in_field_and_headers(front: Any, path: str) -> None:
    body = {**ROUTES[path], "max_tokens": 6, "include_timing": True, "n": 2}
    front.post(path, body)
    response = front.post(path, body)
    answer = response.json()
    timing = answer["timing"]
    assert set(timing) == NAMES
    # Six steps of 20 ms, of which the first is the prefill.
    assert timing["decode_seconds"] >= 0.1
    assert timing["prefill_seconds"] >= 0.02
    assert timing["queue_seconds"] >= 0
    assert timing["preemptions"] == 0
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert timing["cached_tokens"] == cached > 0
    headers = response.headers
    durations = dict(re.findall(r"(\w+);dur=([\d.]+)", headers["server-timing"]))
    for name in ("queue", "prefill", "decode"):
        seconds = timing[f"{name}_seconds"]
        assert float(durations[name]) == pytest.approx(1000 * seconds, abs=0.01)
    assert headers["x-octavo-preemptions"] == "0"
    assert headers["x-octavo-cached-tokens"] == str(cached)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_ends_with_its_times(front: Any, path: str, include_usage: bool) -> None:
    options = {"include_usage": include_usage}
    body = {**ROUTES[path], "max_tokens": 3, "include_timing": True, "stream_options": options}
    *events, last = front.events(path, body)
    assert last["choices"] == []
    assert set(last["timing"]) == NAMES
    assert last["timing"]["decode_seconds"] > 0
    assert ("usage" in last) is include_usage
    assert all("timing" not in event for event in events)


@pytest.mark.parametrize("path", ROUTES)
def test_who_does_not_ask_has_the_headers_alone(front: Any, path: str) -> None:
    response = front.post(path, {**ROUTES[path], "max_tokens": 1})
    assert "timing" not in response.json()
    assert "server-timing" in response.headers
    assert all("timing" not in event for event in front.events(path, ROUTES[path]))


def progress(**times: float) -> ChoiceProgress:
    request = EngineCoreRequest("r", [1, 2], SamplingParams())
    (choice,) = ServingMetrics().start([request], now=100.0)
    for name, value in times.items():
        setattr(choice, name, value)
    return choice


def test_the_longest_times_and_all_preemptions() -> None:
    choices = [
        progress(scheduled_time=101, first_token_time=102, last_token_time=110, num_preemptions=1),
        progress(scheduled_time=103, first_token_time=107, last_token_time=108, num_preemptions=2),
    ]
    choices[0].num_cached_tokens, choices[1].num_cached_tokens = 16, 32
    timing = timing_of(choices, choices_per_prompt=2)
    assert (timing.queue, timing.prefill, timing.decode) == (3, 4, 8)
    assert (timing.num_preemptions, timing.num_cached_tokens) == (3, 16)


def test_a_clock_that_was_set_back_takes_no_time() -> None:
    timing = timing_of(
        [progress(scheduled_time=90, first_token_time=80, last_token_time=70), progress()]
    )
    assert (timing.queue, timing.prefill, timing.decode) == (0, 0, 0)


def test_times_come_from_what_the_engine_tells() -> None:
    metrics = ServingMetrics()
    (choice,) = metrics.start([EngineCoreRequest("r", [1], SamplingParams())], now=10.0)
    delta = OutputDelta(request_id="r", index=0, text="", token_ids=[5], scheduled_time=11.0)
    metrics.add(choice, delta, 12.5)
    assert timing_of([choice]).field() == {
        "queue_seconds": 1.0,
        "prefill_seconds": 1.5,
        "decode_seconds": 0.0,
        "preemptions": 0,
        "cached_tokens": 0,
    }
