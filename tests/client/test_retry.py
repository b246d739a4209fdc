from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from octavo_client.errors import APIConnectionError, APITimeoutError, error_from_response
from octavo_client.retry import RetryPolicy, parse_retry_after

POLICY = RetryPolicy(max_retries=3)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 502])
def test_other_statuses_are_final(status: int) -> None:
    assert POLICY.delay(0, error_from_response(status, b"")) is None


@pytest.mark.parametrize("status", [429, 503])
def test_backoff_doubles_up_to_a_limit(status: int) -> None:
    policy = RetryPolicy(max_retries=100)
    error = error_from_response(status, b"")
    for num_retries, longest in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]):
        delay = policy.delay(num_retries, error)
        assert delay is not None
        assert longest / 2 <= delay <= longest


def test_retry_after_is_honoured_within_reason() -> None:
    assert POLICY.delay(0, error_from_response(429, b"", retry_after=13.0)) == 13.0
    assert POLICY.delay(0, error_from_response(429, b"", retry_after=3600.0)) is None


def test_number_of_retries_is_bounded() -> None:
    error = error_from_response(503, b"", retry_after=0.0)
    assert POLICY.delay(2, error) == 0.0
    assert POLICY.delay(3, error) is None


def test_a_request_that_may_have_begun_is_not_repeated() -> None:
    assert POLICY.delay(0, APIConnectionError("broke")) is None
    assert POLICY.delay(0, APITimeoutError("slow")) is None
    assert POLICY.delay(0, APIConnectionError("refused", connected=False)) is not None
    assert POLICY.delay(0, APITimeoutError("no route", connected=False)) is not None


def test_parse_retry_after() -> None:
    assert parse_retry_after(None) is None
    assert parse_retry_after("2.5") == 2.5
    assert parse_retry_after("-1") == 0.0
    assert parse_retry_after("soon") is None
    assert parse_retry_after("nan") is None
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    delay = parse_retry_after(soon)
    assert delay is not None
    assert 27 < delay <= 30


def test_an_engine_that_died_is_not_asked_again() -> None:
    body = b'{"error": {"message": "the engine has ended", "code": "engine_dead"}}'
    assert POLICY.delay(0, error_from_response(503, body, retry_after=5.0)) is None
    body = b'{"error": {"message": "loading", "code": "model_loading"}}'
    assert POLICY.delay(0, error_from_response(503, body, retry_after=5.0)) == 5.0
