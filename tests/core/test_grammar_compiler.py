from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from octavo_core.errors import InvalidRequestError
from octavo_core.grammar_compiler import MAX_CACHED_GRAMMARS, GrammarCompiler, Work
from octavo_core.structured_outputs import StructuredOutputsParams
from support.fake_grammar import FakeGrammarBackend


def at_once(work: Work) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def test_equal_constraints_are_compiled_once() -> None:
    backend = FakeGrammarBackend()
    grammars = GrammarCompiler(backend, at_once)
    first = grammars.start(regex("1"))
    assert grammars.start(regex("1")) is first
    assert grammars.start(StructuredOutputsParams(regex="1", after="</think>")) is not first
    assert backend.num_compiled == 2


def test_who_was_not_used_for_longest_is_forgotten() -> None:
    """K11: the cache is bounded."""
    backend = FakeGrammarBackend()
    grammars = GrammarCompiler(backend, at_once)
    kept = grammars.start(regex("0"))
    for number in range(1, MAX_CACHED_GRAMMARS + 1):
        grammars.start(regex("0"))
        grammars.start(regex(str(number)))
    assert len(grammars._cache) == MAX_CACHED_GRAMMARS
    assert grammars.start(regex("0")) is kept
    num_compiled = backend.num_compiled
    grammars.start(regex("1"))
    assert backend.num_compiled == num_compiled + 1


def test_a_failure_is_not_kept() -> None:
    backend = FakeGrammarBackend()
    grammars = GrammarCompiler(backend, at_once)
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            grammars.start(regex("unsupported")).result()
    assert backend.num_compiled == 2


def test_the_thread_compiles_and_tells_errors() -> None:
    grammars = GrammarCompiler(FakeGrammarBackend(), max_wait=30)
    good, bad = grammars.start(regex("1")), grammars.start(regex("broken"))
    grammars.wait([good])
    assert good.result().new_matcher().allowed()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="bug"):
        bad.result(30)
