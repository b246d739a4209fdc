"""One log format for all processes, on standard error."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import queue
import re
import sys
import time
from collections.abc import Callable

ACCESS_LOGGER = "octavo_server.access"

# Tells the processes that this one spawns; each has a `configure_logging` of its own.
_JSON_VARIABLE = "OCTAVO_JSON_LOGS"
_PACKAGES = ("octavo_core", "octavo_worker", "octavo_kernels", "octavo_server")

# Lines are written for clients, too: what they send must not begin a line, nor drive a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LINE_BREAK = re.compile(r"\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_MAX_WAITING_ACCESSES = 10_000


def configure_logging(level: str, process: str, *, json_lines: bool | None = None) -> None:
    """Send log lines of `level` and above to standard error.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        process: Short name of this process, shown in each line.
        json_lines: One JSON object a line, here and in processes started from here; by default
            as the process that started this one has it.
    """
    if json_lines is not None:
        os.environ[_JSON_VARIABLE] = "true" if json_lines else "false"
    formatter = JSONFormatter if os.environ.get(_JSON_VARIABLE) == "true" else LineFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _PACKAGES:
        logging.getLogger(name).setLevel(level.upper())


class LineFormatter(logging.Formatter):
    """``I 11-29 23:14:05 front: message``; whatever is in a message, it stays one line.

    The lines of a traceback, of which an exception's text is a part, begin with a bar.
    """

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(levelname).1s %(asctime)s {process}: %(message)s", datefmt="%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback."""
        return escape_controls(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """Return the traceback, each line marked as a part of it."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  | {escape_controls(line)}" for line in _LINE_BREAK.split(text))

    def formatStack(self, stack_info: str) -> str:
        """Return the stack, marked in the same way."""
        return "\n".join(f"  | {escape_controls(line)}" for line in _LINE_BREAK.split(stack_info))


class JSONFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``process``, ``logger``, ``message``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, in which a line break is an escape anyway."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        content |= getattr(record, "fields", {})
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        # Not msgspec: this escapes all that is not ASCII, and takes half a surrogate pair.
        return json.dumps(content)


def escape_controls(text: str) -> str:
    """Write control characters and line breaks as escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def access_logger() -> Callable[[object], None]:
    """Start the access log, and return what adds a line to it.

    A thread of its own formats and writes them, so that no answer waits for a slow terminal or
    disk; when ten thousand lines wait, further ones are dropped.

    Returns:
        A function that takes a dataclass; its text is the line, its fields are those of JSON.
    """
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING_ACCESSES)
    logger = logging.getLogger(ACCESS_LOGGER)
    logger.setLevel(logging.INFO)
    # Not the handler of other lines, whose lock this one may hold for long.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.getLogger().handlers[0].formatter)
    listener = logging.handlers.QueueListener(waiting, handler)
    listener.start()
    atexit.register(listener.stop)

    def log(access: object) -> None:
        record = logger.makeRecord(
            ACCESS_LOGGER, logging.INFO, "", 0, "%s", (access,), None,
            extra={"fields": vars(access)},
        )  # fmt: skip
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(record)

    return log
