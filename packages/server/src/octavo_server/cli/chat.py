"""``octavo chat``: a conversation in the terminal.

Talks to the server at ``--url``, or starts one for itself. Lines from a pipe are
turns too, and then only the answers go to standard output:

    echo "What is the chemical symbol for water?" | octavo chat
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

from octavo_client import APIConnectionError, APIError, Client, Health, OctavoClientError
from octavo_server.cli.local_server import LocalServer

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."

# What a model writes must not steer the terminal: control characters but tab and newline.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``octavo chat``."""
    parser.add_argument(
        "--url", help="server to talk to, for example http://127.0.0.1:8000 (default: start one)"
    )
    parser.add_argument(
        "--model",
        default="",
        help="with --url the name to ask for (default: the server's first); without, the folder, "
        ".gguf file or hub id to serve (default: the starter model)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is deterministic")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one answer")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OCTAVO_API_KEY") or None,
        help="sent as a bearer token (default: OCTAVO_API_KEY)",
    )


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves.

    Returns:
        0, or 1 if the server could not be reached or a turn from a pipe failed.

    Raises:
        OctavoError: A server of our own could not be started.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGHUP, _exit_on_signal)
    try:
        if args.url:
            return _chat_with_server(args)
        return _chat_with_own_server(args)
    except BrokenPipeError:
        # The reader of our output has left. Python would complain once more when it flushes.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        return 1
    except (OctavoClientError, ValueError) as error:
        print(f"octavo chat: error: {error}", file=sys.stderr)
        return 1


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    # As an exception it passes through the blocks that end the server.
    raise SystemExit(128 + number)


def _chat_with_server(args: argparse.Namespace) -> int:
    status = StatusLine(sys.stderr)
    with Client(args.url, api_key=args.api_key) as client:
        try:
            if not client.health().ready:
                client.wait_until_ready(on_progress=status.show_health)
        except APIConnectionError as error:
            print(
                f"octavo chat: error: {args.url}: {error}. Start a server with `octavo serve`, "
                f"or leave out --url.",
                file=sys.stderr,
            )
            return 1
        except APIError:
            pass  # another kind of server, without /health
        finally:
            status.clear()
        model = args.model or _first_model(client)
        return ChatSession(client, args, model).run()


def _chat_with_own_server(args: argparse.Namespace) -> int:
    # Here and not in the server, so that a download or a mistyped path shows in this terminal.
    from octavo_server.model_source import resolve_model

    resolve_model(args.model)
    status = StatusLine(sys.stderr)
    server = LocalServer(args.model)
    with server, Client(server.url, api_key=server.api_key) as client:
        try:
            server.wait_until_ready(client, status.show_health)
        finally:
            status.clear()
        return ChatSession(client, args, _first_model(client)).run()


def _first_model(client: Client) -> str | None:
    models = client.models()
    return models[0].id if models else None


class StatusLine:
    """One line of a terminal that is written over and over; nothing if there is no terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = ""

    def show_health(self, health: Health) -> None:
        """Show how far a start-up is."""
        if health.ready:
            return  # there is no stage any more, and the next thing shown is the prompt
        text = health.stage or "starting the server"
        if health.progress is not None:
            text += f" {health.progress:.0%}"
        self.show(text)

    def show(self, text: str) -> None:
        """Write `text` over what is shown."""
        if self._out.isatty() and text != self._shown:
            self._out.write(f"\r\x1b[K{text} …")
            self._out.flush()
            self._shown = text

    def clear(self) -> None:
        """Empty the line."""
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._shown = ""


class ChatSession:
    """A conversation: reads turns, prints answers, keeps the history."""

    def __init__(self, client: Client, args: argparse.Namespace, model: str | None) -> None:
        self._client = client
        self._model = model
        self._options: dict[str, Any] = {
            name: value
            for name in ("temperature", "max_tokens")
            if (value := getattr(args, name)) is not None
        }
        self._system = [{"role": "system", "content": args.system}] if args.system else []
        self._messages: list[dict[str, str]] = list(self._system)
        self._interactive = sys.stdin.isatty()
        self._escape = sys.stdout.isatty()
        self._failed = False

    def run(self) -> int:
        """Answer turn by turn until the input ends. Returns the exit code."""
        if self._interactive:
            print(f"{self._model or 'the model'} is ready. {HELP}")
        for line in self._turns():
            command = line.strip()
            if command == "/exit":
                break
            if command == "/reset":
                self._messages = list(self._system)
                self._note("The conversation starts anew.")
            elif command:
                self._answer(line)
        return 1 if self._failed and not self._interactive else 0

    def _turns(self) -> Iterator[str]:
        """Yield what the user types, or the lines of a pipe."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A byte that is no UTF-8 can't be sent as JSON.
            sys.stdin.reconfigure(errors="replace")
        if not self._interactive:
            for line in sys.stdin:
                yield line.rstrip("\n")
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - importing it gives input() editing and history
        while True:
            try:
                yield input("> ")
            except KeyboardInterrupt:
                print()
                self._note(HELP)
            except EOFError:
                print()
                return

    def _answer(self, text: str) -> None:
        """Send one turn and print its answer as it comes. A turn that fails leaves no trace."""
        turn = {"role": "user", "content": text}
        parts: list[str] = []
        finish_reason = None
        try:
            with self._client.stream_chat(
                [*self._messages, turn], model=self._model, **self._options
            ) as stream:
                for chunk in stream:
                    parts.append(chunk.text)
                    self._write(chunk.text)
                    if chunk.choices and chunk.choices[0].finish_reason:
                        finish_reason = chunk.choices[0].finish_reason
        except KeyboardInterrupt:
            # Leaving the block has closed the connection, so the server stops computing.
            finish_reason = "interrupt"
        except OctavoClientError as error:
            if parts:
                self._end_line(parts)
            self._fail(error)
            return
        self._end_line(parts)
        if finish_reason == "interrupt":
            self._note("[stopped]")
        elif finish_reason == "length":
            self._note("[the answer was cut at its limit of tokens]")
        self._messages += [turn, {"role": "assistant", "content": "".join(parts)}]

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(_CONTROL) if self._escape else text)
        sys.stdout.flush()

    def _end_line(self, parts: list[str]) -> None:
        if not parts or not parts[-1].endswith("\n"):
            self._write("\n")

    def _fail(self, error: OctavoClientError) -> None:
        self._failed = True
        hint = ""
        if isinstance(error, APIError) and error.code == "context_length_exceeded":
            hint = " /reset forgets the conversation so far."
        print(f"octavo chat: error: {error}{hint}", file=sys.stderr)

    def _note(self, text: str) -> None:
        if self._interactive:
            print(text, file=sys.stderr)
