from __future__ import annotations

import pytest

from octavo_server.number_guard import NumberGuard


@pytest.mark.parametrize(
    ("text", "is_too_long"),
    [
        ("1" * 23, False),
        ("1" * 24, True),
        ("[1, " + "2" * 24, True),
        ("[" + "2" * 24 + ", 1", False),
        ("-0." + "1" * 21, True),
        ("1e9", False),
        ("1e99", True),
        ("1E+10", True),
        ("[1e99, 1", False),
        ('"' + "1" * 50, False),
        ('"' + "1" * 50 + '", 1', False),
        ('"a\\"' + "1" * 50, False),
        ('{"' + "1" * 50 + '": ' + "1" * 24, True),
        ("tru", False),
    ],
)
def test_numbers_are_watched_outside_of_strings(text: str, is_too_long: bool) -> None:
    """G05; however the text is cut into tokens."""
    whole, pieces = NumberGuard(), NumberGuard()
    whole.push(text.encode())
    for byte in text.encode():
        pieces.push(bytes([byte]))
    assert whole.is_too_long is pieces.is_too_long is is_too_long
