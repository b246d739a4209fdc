from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_client.sse import ServerSentEvent, SSEParser


def parse(*parts: bytes) -> list[ServerSentEvent]:
    parser = SSEParser()
    return [event for part in parts for event in parser.feed(part)]


def data_of(*parts: bytes) -> list[str]:
    return [event.data for event in parse(*parts)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end(end: bytes) -> None:
    assert data_of(b"data: a" + end + end + b"data: b" + end + end) == ["a", "b"]


def test_comments_and_unknown_fields_are_skipped() -> None:
    assert data_of(b": ping\n\nid: 4\nretry: 10\nnonsense\ndata: a\n\n: ping\n\n") == ["a"]


def test_several_data_lines_are_joined() -> None:
    assert data_of(b"data: a\ndata\ndata:b\n\n") == ["a\n\nb"]


def test_one_space_is_dropped_after_the_colon() -> None:
    assert data_of(b"data:  a: b\n\n") == [" a: b"]


def test_event_type_lasts_for_one_event() -> None:
    assert parse(b"event: error\ndata: a\n\ndata: b\n\n") == [("error", "a"), ("message", "b")]


def test_byte_order_mark_is_dropped_at_the_start_only() -> None:
    assert data_of(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n") == ["a"]


def test_unfinished_event_is_dropped() -> None:
    assert data_of(b"data: a\n\ndata: b\n") == ["a"]


def test_cr_at_the_end_of_a_part_ends_the_event_at_once() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: a\r\n\r") == [("message", "a")]
    assert parser.feed(b"") == []
    assert parser.feed(b"\ndata: b\r") == []
    assert parser.feed(b"\r") == [("message", "b")]


@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    texts = data.draw(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), max_size=5)
    )
    end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    whole = b": hi" + end + b"".join(b"data: " + t.encode() + end + end for t in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    edges = [0, *cuts, len(whole)]
    parts = [whole[a:b] for a, b in itertools.pairwise(edges)]
    assert data_of(*parts) == texts
