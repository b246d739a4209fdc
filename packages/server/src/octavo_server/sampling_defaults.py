"""Sampling defaults that a model's author ships in generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from octavo_core.errors import InvalidRequestError
from octavo_core.model_spec import read_json
from octavo_core.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(model_path: Path) -> dict[str, Any]:
    """Return the sampling fields that the model's folder sets.

    A value that no request could ask for is ignored with a warning: it would make every
    request without that field fail.

    Args:
        model_path: Folder or .gguf file; a file has no such defaults.
    """
    path = model_path / "generation_config.json"
    if not path.is_file():
        return {}
    config = read_json(path, {})
    defaults: dict[str, Any] = {}
    for field in _FIELDS:
        value = config.get(field)
        if value is None:
            continue
        try:
            SamplingParams(**{field: value})
        except (InvalidRequestError, TypeError) as error:
            logger.warning("Ignoring %s of %s: %s", field, path.name, error)
        else:
            defaults[field] = value
    return defaults
