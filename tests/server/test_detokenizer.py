from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from octavo_server.detokenizer import Detokenizer, StopStringFilter, TextOffsets
from octavo_server.tokenizer import Tokenizer

TEXTS = [
    "a🫠龜🥹 é b",
    "I am testing the spaces",
    " leading and  double spaces",
    "Ünïcödé 👩‍👩‍👧‍👦 👍🏽\n\nनमस्ते",
]


def deltas(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*[detokenizer.push(token_id) for token_id in ids], detokenizer.finish()]


@given(ids=st.lists(st.integers(0, 49200), max_size=40), skip=st.booleans())
def test_byte_level_deltas_join_to_decode(
    starter_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    joined = "".join(deltas(starter_tokenizer, ids, skip_special_tokens=skip))
    assert joined == starter_tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 255), max_size=12))
def test_byte_level_deltas_join_to_decode_for_odd_bytes(
    starter_tokenizer: Tokenizer, ids: list[int]
) -> None:
    # The tokens of single bytes, so that half characters are everywhere.
    singles = [i for i in range(400) if len(starter_tokenizer.token_bytes(i) or b"") == 1]
    ids = [singles[i % len(singles)] for i in ids]
    assert "".join(deltas(starter_tokenizer, ids)) == starter_tokenizer.decode(ids)


@given(
    ids=st.lists(
        st.one_of(st.integers(0, 330), st.sampled_from(range(3 + 0x80, 259))), max_size=30
    ),
    skip=st.booleans(),
)
def test_sentencepiece_deltas_join_to_decode(
    spm_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    joined = "".join(deltas(spm_tokenizer, ids, skip_special_tokens=skip))
    assert joined == spm_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", [*TEXTS, "🥹🫠🦆"])
@pytest.mark.parametrize("fixture", ["starter_tokenizer", "spm_tokenizer"])
def test_offsets_are_where_tokens_start(
    request: pytest.FixtureRequest, fixture: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    offsets = TextOffsets(tokenizer)
    # What precedes a token is whole characters, and then perhaps a part of the next.
    pieces = [tokenizer.token_bytes(token_id) or b"" for token_id in ids]
    heads = [b"".join(pieces[:n]).decode(errors="ignore") for n in range(len(ids) + 1)]
    num_stripped = len(heads[-1]) - len(whole)
    starts = [max(0, len(head) - num_stripped) for head in heads[:-1]]
    assert [offsets.push(token_id) for token_id in ids] == starts
    assert offsets.push(tokenizer.eos_token_ids[0]) == len(whole)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("fixture", ["starter_tokenizer", "spm_tokenizer"])
def test_no_half_characters(request: pytest.FixtureRequest, fixture: str, text: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    pieces = deltas(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 3  # it does stream


@pytest.mark.parametrize("prepend_scheme", ["always", "never"])
@pytest.mark.parametrize("text", [TEXTS[1], "a bb  c", "x"])
def test_other_decoders_join_to_decode(prepend_scheme: str, text: str) -> None:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyzI")}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer = Tokenizer(backend)
    assert tokenizer.decoder_rule.kind == "other"
    ids = tokenizer.encode(text)
    pieces = deltas(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(bool(piece) for piece in pieces) > len(text) // 2


# Stop strings


def test_stop_string_over_several_tokens_never_leaks(spm_tokenizer: Tokenizer) -> None:
    ids = [*spm_tokenizer.encode("ab", False), *spm_tokenizer.encode("cdefg", False)]
    detokenizer = Detokenizer(spm_tokenizer, stop=["b cde"])
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stop_string:
            break
    assert "".join(pieces) == "a"
    assert detokenizer.stop_string == "b cde"


@pytest.mark.parametrize(("include", "expected"), [(False, "a,b,"), (True, "a,b,c,d")])
@pytest.mark.parametrize("chunks", [["a,b,c,d,e"], ["a,b,", "c,d", ",e"], list("a,b,c,d,e")])
def test_stop_string_is_kept_or_left_out(include: bool, expected: str, chunks: list[str]) -> None:
    stop = StopStringFilter(["c,d"], include)
    assert "".join(stop.push(chunk) for chunk in chunks) + stop.finish() == expected
    assert stop.matched == "c,d"


def test_holds_back_only_what_could_be_a_stop_string() -> None:
    stop = StopStringFilter(["</end>"], False)
    assert stop.push("a < b") == "a < b"
    assert stop.push(" <") == " "
    assert stop.push("/e") == ""
    assert stop.push("a") == "</ea"
    assert stop.push("</end") == ""
    assert stop.finish() == "</end"
    assert stop.matched is None


def first_stop(text: str, stops: list[str]) -> str | None:
    """What a reader who sees one character at a time would be left with."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@given(
    chunks=st.lists(st.text(alphabet="abc", max_size=5), max_size=10),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_result_does_not_depend_on_the_chunks(chunks: list[str], stops: list[str]) -> None:
    stop = StopStringFilter(stops, False)
    pushed, given_out, longest = "", "", max(map(len, stops))
    for chunk in chunks:
        given_out += stop.push(chunk)
        pushed += chunk
        if stop.matched is not None:
            break
        assert len(pushed) - len(given_out) < longest
        assert pushed.startswith(given_out)
    expected = first_stop(pushed, stops)
    assert (stop.matched is None) == (expected is None)
    assert given_out + stop.finish() == (pushed if expected is None else expected)


def test_stop_strings_wait_for_min_tokens(spm_tokenizer: Tokenizer) -> None:
    a = spm_tokenizer.encode("xa", False)[-1]  # "a" without a space
    detokenizer = Detokenizer(spm_tokenizer, stop=["aaa"], min_tokens=4)
    pieces = [detokenizer.push(a) for _ in range(4)]
    # Complete at the third token, too early; complete again at the fourth.
    assert detokenizer.stop_string == "aaa"
    assert "".join(pieces) == "a"


def test_a_stop_string_that_passed_early_does_not_count_later(spm_tokenizer: Tokenizer) -> None:
    tokens = {c: spm_tokenizer.encode("x" + c, False)[-1] for c in "abe"}
    detokenizer = Detokenizer(spm_tokenizer, stop=["ab", "abb"], min_tokens=3)
    pieces = [detokenizer.push(tokens[c]) for c in "abe"] + [detokenizer.finish()]
    assert "".join(pieces) == "abe"
    assert detokenizer.stop_string is None
