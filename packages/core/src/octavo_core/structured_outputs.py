"""What the text of an answer has to look like."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo_core.errors import InvalidRequestError

MAX_STRUCTURED_OUTPUT_CHARS = 64 * 1024
MAX_CHOICES = 1024
MAX_MARKER_CHARS = 256

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the text of an answer. Exactly one of the first five is given.

    Attributes:
        json: A JSON schema, as text; the answer is JSON that validates against it. A dict is
            taken, too, and becomes text.
        json_object: The answer is any JSON object.
        regex: The whole answer matches this regular expression.
        choice: The answer is one of these strings.
        grammar: The answer is a sentence of this context-free grammar (Lark's notation
            or GBNF).
        after: The constraint begins after this text, such as the end of the model's thinking;
            what comes before it is free. None: with the first token.

    Raises:
        InvalidRequestError: None or several are given, or one is too long or of a wrong type.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {', '.join(given) or 'nothing'}; it must have exactly one "
                f"of {', '.join(_KINDS)}.",
                field="structured_outputs",
            )
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        if isinstance(self.json, dict):
            # Text, since grammars are cached by it.
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))
        self._check_type(given[0])
        self._check_size(given[0])
        if self.after is not None and not 1 <= len(self.after) <= MAX_MARKER_CHARS:
            raise InvalidRequestError(
                f"structured_outputs.after has {len(self.after)} characters; it must have 1 to "
                f"{MAX_MARKER_CHARS}.",
                field="structured_outputs",
            )

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    def _check_type(self, name: str) -> None:
        value: Any = getattr(self, name)
        if name == "json_object":
            wanted, is_right = "True or False", isinstance(value, bool)
        elif name == "choice":
            wanted = "a list of strings"
            is_right = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        else:
            wanted = "a JSON schema, as text or a dict" if name == "json" else "a string"
            is_right = isinstance(value, str)
        if not is_right:
            raise InvalidRequestError(
                f"structured_outputs.{name} is {value!r}; it must be {wanted}.",
                field="structured_outputs",
            )

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


def _schema_text(schema: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"structured_outputs.json can't be written as JSON: {error}.",
            field="structured_outputs",
        ) from None
