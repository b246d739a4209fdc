"""A small SentencePiece vocabulary, and SentencePiece's own way to use it, written plainly."""

from __future__ import annotations

from itertools import pairwise

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_PIECES = [
    "▁t", "▁a", "he", "▁the", "in", "er", "▁test", "es", "st", "▁tes", "ing", "▁I", "am", "▁am",
    "sp", "ac", "▁sp", "▁spac", "▁spaces", "ce", "ces", "▁s", "pac", "aces", "th", "▁▁", "▁▁▁▁",
    "11", "111", "é▁", "aa", "aaa", "aaaa", "ab", "ba", "aba",
]  # fmt: skip

SPM_TOKENS: list[tuple[str, float, int]] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *[(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)],
    # Scores fall with the rank, as they do in a trained model; a few are shuffled.
    *[(piece, -float((7 * rank) % 37), NORMAL) for rank, piece in enumerate(_PIECES)],
    *[(char, -100.0 - i, NORMAL) for i, char in enumerate("▁abcdefghiIlmnoprstué1.,")],
]


def encode(text: str, add_space_prefix: bool = True) -> list[int]:
    """Encode a text: join the neighbours whose union scores highest, until nothing can be joined.

    Characters that are not in the vocabulary become their UTF-8 bytes.
    """
    ids = {token: token_id for token_id, (token, _, _) in enumerate(SPM_TOKENS)}
    scores = {token: score for token, score, kind in SPM_TOKENS if kind == NORMAL}
    if not text:
        return []
    symbols = list(("▁" if add_space_prefix else "") + text.replace(" ", "▁"))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(symbols))]
        known = [(score, place) for score, place in pairs if score is not None]
        if not known:
            break
        place = -max(known)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    result = []
    for symbol in symbols:
        if symbol in ids:
            result.append(ids[symbol])
        else:
            result += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result
