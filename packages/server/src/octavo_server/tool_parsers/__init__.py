"""Parsers that find calls of tools in what a model writes."""

from __future__ import annotations

from octavo_server.tool_parsers.registry import (
    TOOL_PARSERS,
    check_tool_parser,
    detect_tool_parser,
    tool_parser,
)
from octavo_server.tool_parsers.scanner import Scanner

__all__ = ["TOOL_PARSERS", "Scanner", "check_tool_parser", "detect_tool_parser", "tool_parser"]
