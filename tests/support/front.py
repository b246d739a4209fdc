"""A whole front process on a scripted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from support.scripted_engine import write_byte_model

_MAIN = """
import sys
from octavo_core.config import resolve_config
from octavo_core.errors import OctavoError
from octavo_server import model_source
from octavo_server.front import run_front
from support import front_hooks, scripted_engine

if __name__ == "__main__":
    target, *pairs = sys.argv[1:]
    if target == "slow_download":
        model_source.resolve_model = scripted_engine.slow_download
        target = "run_slow_start"
    config = resolve_config(dict(pair.split("=", 1) for pair in pairs))
    engine = getattr(scripted_engine, target, None) or getattr(front_hooks, target)()
    try:
        sys.exit(run_front(config, engine))
    except OctavoError as error:
        sys.exit(f"error: {error}")
"""


class FrontUnderTest:
    """A whole front process on a scripted engine."""

    def __init__(
        self,
        folder: Path,
        target: str,
        *,
        model: dict[str, Any] | str | Path | None = None,
        prefix: Sequence[str] = (),
        **settings: object,
    ) -> None:
        """`model` is a model's place, or else changes to the byte model's config.json.

        `prefix` is a command that runs the rest of its arguments.
        """
        main = folder / "front_main.py"
        main.write_text(_MAIN)
        path: str | Path
        if isinstance(model, str | Path):
            path = model
        else:
            path = write_byte_model(folder / "model", **(model or {}))
        values = {"model": path, "served_model_name": "bytes", "port": 0, **settings}
        self.stderr_path = folder / "stderr"
        paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        with self.stderr_path.open("w") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, main, target, *(f"{k}={v}" for k, v in values.items())],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self.announcement = ""
        self.url = ""

    def wait_ready(self) -> FrontUnderTest:
        assert self.process.stdout is not None
        self.announcement = self.process.stdout.readline() + self.process.stdout.readline()
        assert "://" in self.announcement, self.stderr
        self.url = self.announcement.splitlines()[0].split()[-1]
        return self

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        # There is no TLS, and reading all certificates of the system takes 0.1 s.
        return httpx.post(self.url + path, json=body, timeout=20, **{"verify": False, **kwargs})

    def get(self, url: str) -> httpx.Response:
        return httpx.get(url, timeout=20, verify=False)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Stream a request, check the frame around it, and return its events."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]
