"""Keeps the numbers of a JSON answer from running on to the token limit."""

from __future__ import annotations

MAX_NUMBER_BYTES = 24
# More of them would be infinite, or 0, to whoever reads a double.
MAX_EXPONENT_DIGITS = 2

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_DIGITS = frozenset(b"0123456789")
_EXPONENT = frozenset(b"eE")
_NUMBER = _DIGITS | _EXPONENT | frozenset(b".+-")


class NumberGuard:
    """Follows a JSON text and tells when a number in it has become too long.

    A schema that says "number" allows any number of digits, and a model without an idea of
    what to say next goes on with more of them.
    """

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False
        self._num_bytes = 0
        self._num_exponent_digits = -1  # before an exponent

    @property
    def is_too_long(self) -> bool:
        """True if the text ends within a number that is to end here, if it may."""
        return (
            self._num_bytes >= MAX_NUMBER_BYTES or self._num_exponent_digits >= MAX_EXPONENT_DIGITS
        )

    def push(self, text: bytes) -> None:
        """Go on by some bytes of the text."""
        for byte in text:
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif byte == _BACKSLASH:
                    self._escaped = True
                elif byte == _QUOTE:
                    self._in_string = False
            elif byte in _NUMBER:
                self._num_bytes += 1
                if byte in _EXPONENT:
                    self._num_exponent_digits = 0
                elif self._num_exponent_digits >= 0 and byte in _DIGITS:
                    self._num_exponent_digits += 1
            else:
                self._num_bytes = 0
                self._num_exponent_digits = -1
                self._in_string = byte == _QUOTE
