"""Tries out grammars in a process of their own, before a request is let in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import sys
from collections import OrderedDict

import msgspec

from octavo_core.errors import InvalidRequestError, QueueFullError
from octavo_core.process import cpu_seconds
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.grammar_check_process import (
    CPU_SECONDS,
    Verdict,
    frame_of,
    too_large,
    too_slow,
    too_slow_today,
)

logger = logging.getLogger(__name__)

MAX_VERDICTS = 256

# The limit is CPU time, which the kernel watches. These are for a machine that has little to
# give: after so many seconds a constraint that has had its share is given up, and one that has
# not got a turn may wait on.
_MAX_SECONDS = 4.0
_SHARE = CPU_SECONDS / 4
_MAX_STARVED_SECONDS = 30.0
_START_SECONDS = 30.0
_QUEUE_SECONDS = 10.0


class GrammarChecker:
    """Says whether constraints can be served, in a process that is killed when it takes too long.

    The process starts with the first constraint. All methods belong to one event loop, which
    never waits: other requests go on.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[StructuredOutputsParams, Verdict] = OrderedDict()
        self._closed = False

    async def check(
        self, params: StructuredOutputsParams, field: str = "structured_outputs"
    ) -> StructuredOutputsParams:
        """Return the constraint in the form that is quickest to compile.

        Args:
            params: The constraint.
            field: What the request calls it.

        Raises:
            InvalidRequestError: It is malformed, not supported, or takes too much time or memory.
            QueueFullError: Too many others are being tried out.
        """
        key = msgspec.structs.replace(params, after=None)
        verdict = self._verdicts.get(key)
        if verdict is None:
            try:
                await asyncio.wait_for(self._turn.acquire(), _QUEUE_SECONDS)
            except TimeoutError:
                raise QueueFullError(
                    "too many other constraints are being compiled; try again later.", field=field
                ) from None
            try:
                verdict = self._verdicts.get(key) or await self._try_out(key)
            finally:
                self._turn.release()
        if not verdict.is_of_today:
            self._remember(key, verdict)
        if verdict.params is None:
            raise InvalidRequestError(verdict.error or "", field=field)
        return msgspec.structs.replace(verdict.params, after=params.after)

    async def close(self) -> None:
        """End the process. Safe to call twice."""
        self._closed = True
        await self._end_process()

    def _remember(self, key: StructuredOutputsParams, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _try_out(self, params: StructuredOutputsParams) -> Verdict:
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(frame_of(msgspec.msgpack.encode(params)))
            return await _read_verdict(process.stdout, process.pid)
        except _StarvedError:
            await self._end_process()
            raise _no_time() from None
        except TimeoutError:
            logger.warning("A constraint was given up after %g s", _MAX_SECONDS)
            await self._end_process()
            return Verdict(error=too_slow_today(), is_of_today=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._end_process()
            if code == -signal.SIGKILL:
                # Its own limits end it otherwise: this says nothing of the constraint.
                logger.warning("The process that tries out constraints was killed")
                raise _no_time() from None
            logger.warning("A constraint has ended its process with exit code %s", code)
            if code == -signal.SIGXCPU:
                return Verdict(error=too_slow())
            return Verdict(error=too_large())
        except asyncio.CancelledError:
            # Its answer would be taken for the next one's.
            process.kill()
            self._process = None
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise QueueFullError("the server is shutting down.")
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "octavo_server.grammar_check_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # A Ctrl-C is the front's to handle.
                start_new_session=True,
            )
            assert process.stdout is not None
            await asyncio.wait_for(_read_frame(process.stdout), _START_SECONDS)
        except (asyncio.IncompleteReadError, OSError) as error:  # a TimeoutError is one, too
            await self._end_process()
            logger.warning("No process that tries out constraints could be started: %r", error)
            raise _no_time() from None
        except BaseException:
            await self._end_process()
            raise
        return process

    async def _end_process(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                # Its exit code tells why it ended, unless it is still running.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.0 if self._closed else 0.05)
                if process.returncode is None:
                    process.kill()
        return await process.wait()


def _no_time() -> QueueFullError:
    return QueueFullError("the server has no time for constraints just now; try again later.")


class _StarvedError(Exception):
    """The process got no time to work in."""


async def _read_verdict(stdout: asyncio.StreamReader, pid: int) -> Verdict:
    """Wait for the answer about one constraint.

    Raises:
        TimeoutError: It has had time enough.
        _StarvedError: It has had hardly any, and waited for long.
    """
    started = cpu_seconds(pid)
    reading = asyncio.ensure_future(_read_frame(stdout))
    try:
        for _ in range(math.ceil(_MAX_STARVED_SECONDS / _MAX_SECONDS)):
            done, _ = await asyncio.wait({reading}, timeout=_MAX_SECONDS)
            if done:
                return msgspec.msgpack.decode(reading.result(), type=Verdict)
            if cpu_seconds(pid) - started >= _SHARE:
                raise TimeoutError
        raise _StarvedError
    finally:
        reading.cancel()


async def _read_frame(stream: asyncio.StreamReader) -> bytes:
    head = await stream.readexactly(4)
    return await stream.readexactly(int.from_bytes(head, "little"))
