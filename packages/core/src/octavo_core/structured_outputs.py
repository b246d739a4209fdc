"""What the text of an answer has to look like."""

from __future__ import annotations

import msgspec

from octavo_core.errors import InvalidRequestError

MAX_STRUCTURED_OUTPUT_CHARS = 64 * 1024
MAX_CHOICES = 1024
MAX_MARKER_CHARS = 256

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the text of an answer. Exactly one of the first five is given.

    Attributes:
        json: A JSON schema, as text; the answer is JSON that validates against it.
        json_object: The answer is any JSON object.
        regex: The whole answer matches this regular expression.
        choice: The answer is one of these strings.
        grammar: The answer is a sentence of this context-free grammar (Lark's notation
            or GBNF).
        after: The constraint begins after this text, such as the end of the model's thinking;
            what comes before it is free. None: with the first token.

    Raises:
        InvalidRequestError: None or several are given, or one is too long.
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
