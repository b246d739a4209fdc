"""What the text of an answer has to look like."""

from __future__ import annotations

import msgspec

from octavo_core.errors import InvalidRequestError

MAX_STRUCTURED_OUTPUT_CHARS = 64 * 1024
MAX_CHOICES = 1024


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the text of an answer. Exactly one of the five is given.

    Attributes:
        json: A JSON schema, as text; the answer is JSON that validates against it.
        json_object: The answer is any JSON object.
        regex: The whole answer matches this regular expression.
        choice: The answer is one of these strings.
        grammar: The answer is a sentence of this context-free grammar (Lark's notation
            or GBNF).

    Raises:
        InvalidRequestError: None or several are given, or one is too long.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [
            name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {', '.join(given) or 'nothing'}; it must have exactly one "
                f"of {', '.join(self.__struct_fields__)}.",
                field="structured_outputs",
            )
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        self._check_size(given[0])

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        if name == "choice" and not 1 <= len(value) <= MAX_CHOICES:
            raise InvalidRequestError(
                f"structured_outputs.choice has {len(value)} strings; it must have 1 to "
                f"{MAX_CHOICES}.",
                field="structured_outputs",
            )
        num_chars = sum(map(len, value)) if name == "choice" else len(str(value))
        if num_chars > MAX_STRUCTURED_OUTPUT_CHARS:
            raise InvalidRequestError(
                f"structured_outputs.{name} has {num_chars} characters; it must have at most "
                f"{MAX_STRUCTURED_OUTPUT_CHARS}.",
                field="structured_outputs",
            )
