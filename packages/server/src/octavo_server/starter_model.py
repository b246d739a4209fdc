"""The model that is served when none is named."""

from __future__ import annotations

from pathlib import Path

from octavo_core.executor import ProgressCallback


def starter_gguf(on_progress: ProgressCallback | None = None) -> Path:
    raise NotImplementedError
