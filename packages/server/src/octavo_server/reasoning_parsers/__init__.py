"""Parsers that split what a model thinks from what it says."""

from __future__ import annotations

from octavo_server.reasoning_parsers.registry import (
    REASONING_PARSERS,
    check_reasoning_parser,
    detect_reasoning_parser,
    reasoning_parser,
)
from octavo_server.reasoning_parsers.think import ThinkParser

__all__ = [
    "REASONING_PARSERS",
    "ThinkParser",
    "check_reasoning_parser",
    "detect_reasoning_parser",
    "reasoning_parser",
]
