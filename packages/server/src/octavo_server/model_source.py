"""Where a model's files are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ResolvedModel(NamedTuple):
    path: Path
    name: str


def resolve_model(model: str, revision: str | None = None) -> ResolvedModel:
    raise NotImplementedError
