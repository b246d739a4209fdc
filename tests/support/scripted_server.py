"""A real HTTP server on loopback that answers as a test tells it to."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """One answer. Parts of a body are bytes to send, or seconds to wait."""

    status: int = 200
    parts: list[bytes | float] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    cut: bool = False  # drop the connection after the parts

    @classmethod
    def json(cls, value: Any, status: int = 200, **headers: str) -> Reply:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(status, [json.dumps(value).encode()], named)

    @classmethod
    def stream(cls, *parts: bytes | float, cut: bool = False) -> Reply:
        headers = {"Content-Type": "text/event-stream"}
        return cls(200, list(parts), headers, chunked=True, cut=cut)


@dataclass
class Received:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class ScriptedServer:
    """Answers requests with `replies`, in order, and keeps what it received."""

    def __init__(self) -> None:
        self.replies: deque[Reply] = deque()
        self.received: list[Received] = []
        self.client_left = threading.Event()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                script.answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that hang up are what some tests are about."""
                if not isinstance(sys.exception(), OSError):
                    super().handle_error(request, client_address)

        self._httpd = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}"
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.02,))
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length", 0))
        body = json.loads(handler.rfile.read(length)) if length else None
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.received.append(Received(handler.command, handler.path, headers, body))
        reply = self.replies.popleft()
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if reply.chunked:
            handler.send_header("Transfer-Encoding", "chunked")
        else:
            size = sum(len(part) for part in reply.parts if isinstance(part, bytes))
            handler.send_header("Content-Length", str(size))
        handler.end_headers()
        try:
            self._send_parts(handler, reply)
        except OSError:
            self.client_left.set()
            handler.close_connection = True

    def _send_parts(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        for part in reply.parts:
            if isinstance(part, float):
                time.sleep(part)
                continue
            frame = b"%x\r\n%s\r\n" % (len(part), part) if reply.chunked else part
            handler.wfile.write(frame)
            handler.wfile.flush()
        if reply.cut:
            handler.close_connection = True
        elif reply.chunked:
            handler.wfile.write(b"0\r\n\r\n")

    def close(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()
