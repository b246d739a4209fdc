"""``octavo run-batch``: answers a file of requests, in OpenAI's batch format.

Talks to the server at ``--url``, or starts one for itself. A run that was ended goes on
where it was: requests that the output has an answer to are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# tqdm ships no types.
from tqdm import tqdm  # type: ignore[import-untyped]

from octavo_client import (
    APIConnectionError,
    APIError,
    AsyncClient,
    Client,
    InvalidArgumentError,
    InvalidResponseError,
    OctavoClientError,
)
from octavo_core.errors import ConfigError, EngineDeadError
from octavo_server.batch_file import (
    BadLine,
    BatchOutput,
    BatchRequest,
    BatchResponse,
    BatchResult,
    read_requests,
)
from octavo_server.cli.local_server import LocalServer

DEFAULT_CONCURRENCY = 64

Lines = Iterator[BatchRequest | BadLine]

# A server that is full says when to come again; a batch has the time.
_MAX_RETRIES = 10
_UNAUTHORIZED = 401


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``octavo run-batch``."""
    parser.add_argument(
        *("-i", "--input-file"),
        type=Path,
        required=True,
        metavar="FILE",
        help="requests, one JSON object a line: custom_id, method, url, body",
    )
    parser.add_argument(
        *("-o", "--output-file"),
        type=Path,
        required=True,
        metavar="FILE",
        help="answers, in the order in which they come; those that are there already stay",
    )
    parser.add_argument(
        "--url", help="server to ask, for example http://127.0.0.1:8000 (default: start one)"
    )
    parser.add_argument(
        "--model",
        default="",
        help="without --url the folder, .gguf file or hub id to serve (default: the starter model)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=_positive,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"most requests at one time (default: {DEFAULT_CONCURRENCY})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OCTAVO_API_KEY") or None,
        help="sent as a bearer token (default: OCTAVO_API_KEY)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer every request of the input.

    Returns:
        0, or 1 if a request has no answer; the output says why.

    Raises:
        OctavoError: A file can't be used, or a server of our own could not be started.
    """
    if args.output_file.exists() and args.output_file.samefile(args.input_file):
        raise ConfigError(
            f"{args.output_file} is the input too; answers need a file of their own.",
            field="output_file",
        )
    lines = read_requests(args.input_file)
    # Before a model is loaded for nothing. A pipe can be read only once.
    lines = itertools.chain(list(itertools.islice(lines, 1)), lines)
    with BatchOutput(args.output_file) as output:
        try:
            counts = _run_on_server(args, output, lines)
        except (OctavoClientError, ValueError) as error:
            print(f"octavo run-batch: error: {error}", file=sys.stderr)
            return 1
    print(
        f"{counts['answered']} answered, {counts['failed']} failed, "
        f"{counts['skipped']} answered before",
        file=sys.stderr,
    )
    return 1 if counts["failed"] else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _run_on_server(args: argparse.Namespace, output: BatchOutput, lines: Lines) -> Counter[str]:
    if args.url:
        with Client(args.url, api_key=args.api_key) as client:
            client.wait_until_ready()
        return asyncio.run(_Run(args, args.url, args.api_key, output, lines).run())
    # Here and not in the server, so that a download or a mistyped path shows in this terminal.
    from octavo_server.model_source import resolve_model

    resolve_model(args.model)
    with LocalServer(args.model) as server, Client(server.url, api_key=server.api_key) as client:
        server.wait_until_ready(client, lambda health: None)
        try:
            return asyncio.run(_Run(args, server.url, server.api_key, output, lines).run())
        except OctavoClientError:
            server.check_alive()  # says why it is gone
            raise


class _Run:
    """Keeps `max_concurrency` requests on their way, and reads no further ahead."""

    def __init__(
        self,
        args: argparse.Namespace,
        url: str,
        api_key: str | None,
        output: BatchOutput,
        lines: Lines,
    ) -> None:
        self._args = args
        self._url = url
        self._api_key = api_key
        self._output = output
        self._lines = lines
        self._counts: Counter[str] = Counter()

    async def run(self) -> Counter[str]:
        bar = tqdm(desc="Requests", unit="request", disable=None)
        client = AsyncClient(self._url, api_key=self._api_key, max_retries=_MAX_RETRIES)
        try:
            with bar:
                async with client, asyncio.TaskGroup() as group:
                    for _ in range(self._args.max_concurrency):
                        group.create_task(self._work(client, bar))
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None  # the others say the same
        return self._counts

    async def _work(self, client: AsyncClient, bar: tqdm) -> None:
        for line in self._due():
            if isinstance(line, BadLine):
                result = BatchResult.failed(line.custom_id, "invalid_line", line.reason)
            else:
                result = await _ask(client, line)
            self._output.write(result)
            self._counts["answered" if result.is_answered else "failed"] += 1
            bar.update()

    def _due(self) -> Iterator[BatchRequest | BadLine]:
        """Yield what has no answer yet; all workers take from the same lines."""
        for line in self._lines:
            if isinstance(line, BatchRequest) and line.custom_id in self._output.answered:
                self._counts["skipped"] += 1
                continue
            yield line


async def _ask(client: AsyncClient, request: BatchRequest) -> BatchResult:
    """Return the server's answer, be it an error.

    Raises:
        APIConnectionError: There is no server any more: the rest can wait for the next run.
        EngineDeadError: Likewise, as the server itself says.
        ConfigError: The server does not know the key, so no line would get an answer.
    """
    try:
        body = await client.post(request.url, request.body)
    except APIError as error:
        if error.status == _UNAUTHORIZED:
            raise ConfigError(
                f"the server refuses the key of --api-key or OCTAVO_API_KEY: {error.message}.",
                field="api_key",
            ) from error
        if error.code == "engine_dead":
            raise EngineDeadError(error.message) from error
        content = {"error": {"message": error.message, "param": error.param, "code": error.code}}
        response = BatchResponse(error.status, error.request_id, content)
        return BatchResult(request.custom_id, response, None)
    except APIConnectionError as error:
        if not error.connected:
            raise
        return BatchResult.failed(request.custom_id, "connection_error", str(error))
    except InvalidArgumentError as error:
        return BatchResult.failed(request.custom_id, "invalid_line", str(error))
    except InvalidResponseError as error:
        return BatchResult.failed(request.custom_id, "invalid_response", str(error))
    request_id = body.get("id") if isinstance(body, dict) else None
    return BatchResult(request.custom_id, BatchResponse(200, request_id, body), None)
