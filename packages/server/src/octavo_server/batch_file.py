"""Files of requests and of answers in OpenAI's batch format: one JSON object a line.

{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}

{"id": "batch_req_…", "custom_id": "1", "error": null,
 "response": {"status_code": 200, "request_id": "cmpl-…", "body": {…}}}
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec

from octavo_core.errors import ConfigError

# A longer line is no request that a server takes, whose limit is 16 MiB.
MAX_LINE_BYTES = 64 * 1024 * 1024
_MAX_ID_CHARS = 1024


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """What the server answered: a body, which is an error unless the status is 200."""

    status_code: int
    request_id: str | None
    body: Any


class BatchError(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """One line of the output."""

    # Both must be there in a line: else a file of requests would be taken for one of answers.
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None
    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")

    @classmethod
    def failed(cls, custom_id: str | None, code: str, message: str) -> BatchResult:
        """Make the line of a request that has no answer."""
        return cls(custom_id, None, BatchError(code, message))

    @property
    def is_answered(self) -> bool:
        """True if nothing is left to do for this request."""
        return self.response is not None and self.response.status_code == 200


class BadLine(NamedTuple):
    """A line of the input that is no request."""

    custom_id: str | None
    reason: str


def read_requests(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Read a file of requests, line by line. Empty lines are left out.

    Raises:
        ConfigError: The file can't be read.
    """
    try:
        with path.open("rb") as file:
            seen: set[str] = set()
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield _read_request(line, number, seen)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.", field="input_file") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, and of one that is too long its start alone."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield line


def _read_request(line: bytes, number: int, seen: set[str]) -> BatchRequest | BadLine:
    if len(line) > MAX_LINE_BYTES:
        return BadLine(None, f"line {number} is longer than {MAX_LINE_BYTES} bytes")
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    # In turn: no JSON or another shape, bytes that are no UTF-8, brackets without end.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(_custom_id_of(line), f"line {number} is no request: {error}")
    reason = _what_is_wrong(request, seen)
    seen.add(request.custom_id)
    if reason is not None:
        return BadLine(request.custom_id, f"line {number}: {reason}")
    return request


def _what_is_wrong(request: BatchRequest, seen: set[str]) -> str | None:
    if not 1 <= len(request.custom_id) <= _MAX_ID_CHARS:
        return f"custom_id must have 1 to {_MAX_ID_CHARS} characters"
    if request.custom_id in seen:
        return f"custom_id {request.custom_id!r} was there before"
    if request.method != "POST":
        return f"method is {request.method!r}; it must be 'POST'"
    if not request.url.startswith("/v1/"):
        return f"url is {request.url!r}; it must be a route such as '/v1/chat/completions'"
    if request.body.get("stream"):
        return "body.stream is true; a file can't take a stream"
    return None


def _custom_id_of(line: bytes) -> str | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return custom_id if isinstance(custom_id, str) else None


class BatchOutput:
    """The file of answers, which an earlier run may have begun.

    Answers of that run stay. Lines without an answer, and one that was cut when the run
    ended, are removed: those requests are tried again.

    Args:
        path: Made if it is not there.

    Attributes:
        answered: ``custom_id`` of the answers that are there already.

    Raises:
        ConfigError: The file can't be written, is no such file, or another run writes it.
    """

    def __init__(self, path: Path) -> None:
        self.answered: set[str] = set()
        try:
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is no regular file.", field="output_file")
            self._file = path.open("a+b")
            self._lock(path)
            self._keep_answers(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._path = path

    def write(self, result: BatchResult) -> None:
        """Append one line, whole.

        Raises:
            ConfigError: There is no room for it. The next run tries its request again.
        """
        try:
            self._file.write(msgspec.json.encode(result) + b"\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What could not be written stays in its buffer, and was told of.
        with contextlib.suppress(OSError):
            self._file.close()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path} is being written by another run; wait for it, or name another file.",
                field="output_file",
            ) from None

    def _keep_answers(self, path: Path) -> None:
        self._file.seek(0)
        kept, num_dropped = path.with_name(f"{path.name}.{os.getpid()}.tmp"), 0
        try:
            with kept.open("wb") as target:
                for number, line in enumerate(self._file, start=1):
                    result = _read_result(line, number, path)
                    if result is None or not result.is_answered:
                        num_dropped += 1
                        continue
                    assert result.custom_id is not None
                    self.answered.add(result.custom_id)
                    target.write(line)
            if num_dropped:
                # In place of a rename, which would leave the lock on a file without a name.
                self._file.truncate(0)
                with kept.open("rb") as source:
                    while part := source.read(1 << 20):
                        self._file.write(part)
                self._file.flush()
        finally:
            kept.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"{path} can't be written: {reason}.", field="output_file")


def _read_result(line: bytes, number: int, path: Path) -> BatchResult | None:
    """Read a line of answers; None if a run has ended in the middle of it.

    Raises:
        ConfigError: The line is whole and something else: the file is not ours to change.
    """
    try:
        return msgspec.json.decode(line, type=BatchResult)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if not line.endswith(b"\n"):
            return None
        raise ConfigError(
            f"{path} has something in line {number} that is no answer of a batch; name another "
            f"file.",
            field="output_file",
        ) from None
