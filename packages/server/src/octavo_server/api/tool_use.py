"""What a request says about tools, whichever API it came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo_server.api.chat_protocol import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    Function,
    NamedTool,
    ToolChoice,
)

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """The tools that may be called, and whether one has to be.

    Attributes:
        functions: Empty if no tool may be called.
        is_parallel: False if there may be one call only.
    """

    functions: Sequence[Function] = ()
    mode: Mode = "none"
    is_parallel: bool = True

    @classmethod
    def of(
        cls, functions: Sequence[Function], choice: ToolChoice | None, is_parallel: bool
    ) -> ToolUse:
        """Apply a choice to the tools that there are. ``none`` is as if there were none."""
        match choice:
            case "none":
                return NO_TOOLS
            case "required":
                mode: Mode = "required"
            case NamedTool(function=named):
                functions = [function for function in functions if function.name == named.name]
                return cls(functions[:1], "named", False)
            case AllowedToolsChoice(allowed_tools=allowed):
                names = {tool.function.name for tool in allowed.tools}
                functions = [function for function in functions if function.name in names]
                mode = allowed.mode
            case _:
                mode = "auto"
        return cls(functions, mode, is_parallel) if functions else NO_TOOLS

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [function.name for function in self.functions]

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Return each tool's JSON schema by the tool's name."""
        return {function.name: function.parameters or {} for function in self.functions}

    @property
    def is_forced(self) -> bool:
        """True if the answer has to be a call."""
        return self.mode in ("required", "named")

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates expect them."""
        return [
            {"type": "function", "function": self._described(function)}
            for function in self.functions
        ] or None

    def schemas(self) -> list[dict[str, Any]]:
        """Return each tool's name, parameters and strictness."""
        return [function.model_dump(exclude_none=True) for function in self.functions]

    @staticmethod
    def _described(function: Function) -> dict[str, Any]:
        # Templates look at all three, and some fail where one is missing.
        return {
            "name": function.name,
            "description": function.description or "",
            "parameters": function.parameters or {"type": "object", "properties": {}},
        }


NO_TOOLS = ToolUse()


def tool_use_of(body: ChatCompletionRequest) -> ToolUse:
    """Return what a chat body says about tools."""
    return ToolUse.of(
        [tool.function for tool in body.tools or ()],
        body.tool_choice,
        body.parallel_tool_calls is not False,
    )
