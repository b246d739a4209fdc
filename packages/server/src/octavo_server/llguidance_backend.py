"""Structured output through the llguidance library: one library, one way to compile."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import llguidance
import msgspec

from octavo_core.errors import InvalidRequestError, OctavoError
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.delayed_matcher import DelayedMatcher
from octavo_server.grammar_vocabulary import GrammarVocabulary
from octavo_server.json_schema import check_json_schema, find_keyword
from octavo_server.number_guard import NumberGuard

# JSON is written in one way, that of Python's json.dumps. Where blanks are optional, small models
# get lost in them, and every one of them is a token; without a choice most of them are forced.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

# A lexer state takes up to 2 kB, so this is 100 MB at most. The library allows 250,000.
_MAX_LEXER_STATES = 50_000
# Steps of at most 14 ms and 2.5 ms; a request whose grammar needs more fails.
_STEP_LEXER_FUEL = 200_000
_STEP_MAX_ITEMS = 50_000

# How the library says that one of its limits was met; it has more than one way.
_TOO_COMPLEX = ("ParserTooComplex", "LexerTooComplex")
_LIMIT = re.compile(r"\blimit\b|too (?:many|complex|large)", re.IGNORECASE)

_MAX_FORCED_TOKENS = 64
_MAX_SHOWN_CHARS = 500
_REGEX_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class LLGuidanceBackend:
    """Compiles constraints for a vocabulary.

    Args:
        load_vocabulary: Makes the vocabulary when it is needed first, which takes a while.
    """

    def __init__(self, load_vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """The vocabulary."""
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        return self._vocabulary

    def prepare(self) -> None:
        """Make the vocabulary, if it is not there yet."""
        assert self.vocabulary is not None

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceGrammar:
        """Compile a constraint.

        Raises:
            InvalidRequestError: It is malformed, not supported, too complex or allows no text.
        """
        schema = check_json_schema(params.json) if params.json is not None else None
        source = _source(params, schema)
        matcher = llguidance.LLMatcher(self.vocabulary.index, source, log_level=0, limits=_limits())
        error = _first_error(matcher)
        if error:
            raise _explain(params, schema, error)
        return LLGuidanceGrammar(self.vocabulary, matcher, params)


class LLGuidanceGrammar:
    """A compiled constraint.

    Args:
        vocabulary: The model's vocabulary.
        matcher: The library's matcher, at its start; copies of it follow the answers.
        params: What was compiled.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        matcher: llguidance.LLMatcher,
        params: StructuredOutputsParams,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._params = params

    def new_matcher(self) -> LLGuidanceMatcher | DelayedMatcher:
        """Return a matcher at the start of an answer."""
        guard = NumberGuard() if self._params.kind in ("json", "json_object") else None
        matcher = LLGuidanceMatcher(self._vocabulary, self._matcher.deep_copy(), guard)
        if self._params.after is None:
            return matcher
        return DelayedMatcher(matcher, self._params.after.encode(), self._vocabulary)


class LLGuidanceMatcher:
    """One answer's place in a grammar.

    Args:
        vocabulary: The model's vocabulary.
        matcher: The library's matcher, for this answer alone.
        guard: Watches over the numbers of a JSON text.
    """

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        matcher: llguidance.LLMatcher,
        guard: NumberGuard | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._guard = guard

    @property
    def is_terminated(self) -> bool:
        """True once nothing may follow but the end."""
        return self._matcher.is_stopped()

    def bitmask(self) -> bytes:
        """Return the tokens that may come next.

        Raises:
            InvalidRequestError: The grammar is too complex.
        """
        # The library's mask has a word to spare.
        mask = self._matcher.compute_bitmask()[: self._vocabulary.num_bytes]
        if self._matcher.is_error():
            self._fail()
        if self._guard is not None and self._guard.is_too_long:
            shorter = int.from_bytes(mask, "little") & ~self._vocabulary.number_mask
            if shorter:  # a minimum may ask for more digits
                return shorter.to_bytes(len(mask), "little")
        return mask

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Move on by tokens of the answer.

        Raises:
            ValueError: A token is not allowed.
        """
        for token_id in token_ids:
            if not self._matcher.consume_token(token_id):
                self._fail()
        self._watch(token_ids)

    def accept_text(self, text: bytes) -> None:
        """Move on by the bytes of a token that began before the grammar did.

        Raises:
            ValueError: They are not allowed.
        """
        self.accept_tokens(self._vocabulary.index.tokenize_bytes(text))

    def take_forced_tokens(self) -> list[int]:
        """Move on by the tokens that must come next, and return them."""
        if self._matcher.is_stopped():
            return []
        token_ids = self._matcher.compute_ff_tokens()[:_MAX_FORCED_TOKENS]
        # The library tokenizes the text that must come with our tokenizer. One that puts a space
        # in front of every text gives tokens of another text.
        if self._matcher.validate_tokens(token_ids) != len(token_ids):
            return []
        self.accept_tokens(token_ids)
        return token_ids

    def _watch(self, token_ids: Sequence[int]) -> None:
        if self._guard is not None:
            for token_id in token_ids:
                self._guard.push(self._vocabulary.tokens[token_id])

    def _fail(self) -> NoReturn:
        message = _first_line(self._matcher.get_error())
        if _LIMIT.search(message) or self._matcher.stop_reason() in _TOO_COMPLEX:
            raise _invalid(f"structured_outputs is too complex to be followed: {message}.")
        raise ValueError(message)


def _first_error(matcher: llguidance.LLMatcher) -> str:
    """Return what is wrong with a grammar: some of it shows only with the first mask or token."""
    first = matcher.deep_copy()
    if not first.is_error():
        mask = int.from_bytes(first.compute_bitmask(), "little")
        if not first.is_error() and not first.is_stopped():
            first.consume_token((mask & -mask).bit_length() - 1)
            first.compute_ff_tokens()
    return first.get_error()


def prepared(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the same constraint in the form that is quickest to compile again.

    Raises:
        InvalidRequestError: A grammar in GBNF is malformed.
    """
    if params.grammar is None or not _is_gbnf(params.grammar):
        return params
    return msgspec.structs.replace(params, grammar=_to_lark(params.grammar))


def _source(params: StructuredOutputsParams, schema: Any) -> str:
    """Return the constraint as the library wants it."""
    match params.kind:
        case "json":
            return _json_source(schema)
        case "json_object":
            return _json_source({"type": "object"})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            escaped = (_REGEX_SPECIAL.sub(r"\\\1", choice) for choice in params.choice or ())
            return llguidance.LLMatcher.grammar_from_regex(f"(?:{'|'.join(escaped)})")
        case _:
            grammar = params.grammar or ""
            if _is_gbnf(grammar):
                grammar = _to_lark(grammar)
            return llguidance.LLMatcher.grammar_from_lark(grammar)


def _json_source(schema: Any) -> str:
    text = msgspec.json.encode(schema).decode()
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)


def _is_gbnf(grammar: str) -> bool:
    return _GBNF.search(grammar) is not None


def _to_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # it raises whatever its parser stumbles over
        raise _invalid(f"structured_outputs.grammar is no valid GBNF: {error}.") from error


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        verbose_errors=False,
    )


def _explain(params: StructuredOutputsParams, schema: Any, message: str) -> OctavoError:
    """Say what is wrong in the words of the request, with the place where it is known."""
    kind = params.kind
    what = "the JSON schema" if kind == "json" else f"structured_outputs.{kind}"
    if message.startswith("NoExtension"):
        return _invalid(f"{what} allows no text at all.")
    keys = re.match(r"Unimplemented keys: (\[.*\])", message)
    if keys and schema is not None:
        keyword = msgspec.json.decode(keys[1])[0]
        place = find_keyword(schema, keyword)
        where = f" at {place or '/'}" if place is not None else ""
        return _invalid(f'{what} has the keyword "{keyword}"{where}, which is not supported.')
    return _invalid(f"{what} can't be used: {_first_line(message)}.")


def _first_line(message: str) -> str:
    message = message.split("<state>")[0].strip()
    return re.sub(r"\s*\n\s*", " ", message)[:_MAX_SHOWN_CHARS].rstrip(".")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="structured_outputs")
