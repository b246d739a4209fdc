"""Octavo's server: the ``octavo`` command, the HTTP API and the offline `LLM`.

The names below are imported on first use, so that ``octavo --version`` does not
wait for a tokenizer library or an HTTP framework.
"""

from __future__ import annotations

from importlib import import_module

# Not from typing, which would be most of the time that importing this package takes.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from octavo_core.sampling_params import SamplingParams
    from octavo_core.structured_outputs import StructuredOutputsParams
    from octavo_server.llm import LLM
    from octavo_server.request_output import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "octavo_server.llm",
    "SamplingParams": "octavo_core.sampling_params",
    "StructuredOutputsParams": "octavo_core.structured_outputs",
    "RequestOutput": "octavo_server.request_output",
    "CompletionOutput": "octavo_server.request_output",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
