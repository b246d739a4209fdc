"""Constraints compiled for the starter model's vocabulary; answers are written at random."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from octavo_core.errors import InvalidRequestError
from octavo_core.model_spec import read_model_spec
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_server.grammar_vocabulary import GrammarVocabulary, model_vocabulary
from octavo_server.llguidance_backend import LLGuidanceBackend
from octavo_server.number_guard import MAX_NUMBER_BYTES
from octavo_server.tokenizer import Tokenizer
from support.engine_fakes import tiny_spec
from support.grammar_walk import Walker
from support.json_schemas import BROKEN, UNSUPPORTED, Schema, all_schemas

SCHEMAS = all_schemas()


@pytest.fixture(scope="module")
def vocabulary(starter_path, starter_tokenizer: Tokenizer) -> GrammarVocabulary:
    return model_vocabulary(starter_tokenizer, read_model_spec(starter_path))


@pytest.fixture(scope="module")
def backend(vocabulary: GrammarVocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(lambda: vocabulary)


@pytest.fixture
def walker(vocabulary: GrammarVocabulary) -> Walker:
    return Walker(vocabulary)


def of_schema(schema: Schema) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema, ensure_ascii=False))


def test_there_are_enough_schemas() -> None:
    assert len(SCHEMAS) >= 200


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_validate(name: str, backend: LLGuidanceBackend, walker: Walker) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker(("email", "ipv4", "ipv6", "uuid"))
    )
    grammar = backend.compile(of_schema(schema))
    for _ in range(2):
        text, _ = walker.write(grammar)
        value = json.loads(text)
        assert b"Infinity" not in json.dumps(value).encode(), "a number too large for a double"
        validator.validate(value)
        # In one way only, so that no model gets lost in blanks.
        assert not re.search(rb"[\n\t]|  ", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_enforced_is_named(name: str, backend: LLGuidanceBackend) -> None:
    schema, word = UNSUPPORTED[name]
    with pytest.raises(InvalidRequestError, match=re.escape(word)):
        backend.compile(of_schema(schema))


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - {"other_document", "look_ahead"}))
def test_a_lenient_schema_ignores_it(name: str, backend: LLGuidanceBackend) -> None:
    schema, _ = UNSUPPORTED[name]
    assert isinstance(schema, dict)
    assert backend.compile(of_schema(schema | {"x-guidance": {"lenient": True}}))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_schema_is_refused_with_its_place(name: str, backend: LLGuidanceBackend) -> None:
    """G01, G03 and X07."""
    text, place = BROKEN[name]
    with pytest.raises(InvalidRequestError, match=re.escape(place)) as caught:
        backend.compile(StructuredOutputsParams(json=text))
    assert len(caught.value.message) < 1000


def test_the_place_of_an_unsupported_keyword_is_told(backend: LLGuidanceBackend) -> None:
    schema = {"type": "array", "items": {"type": "object", "properties": {"a/b": {"not": {}}}}}
    with pytest.raises(InvalidRequestError, match=re.escape('"not" at /items/properties/a~1b')):
        backend.compile(of_schema(schema))


def test_bounds_above_32_bits_are_honoured(backend: LLGuidanceBackend, walker: Walker) -> None:
    """G03"""
    schema = {"type": "integer", "minimum": 19_999_999_990, "maximum": 20_000_000_000}
    grammar = backend.compile(of_schema(schema))
    for _ in range(10):
        assert 19_999_999_990 <= int(walker.write(grammar)[0]) <= 20_000_000_000


def test_a_length_of_a_billion_costs_nothing(backend: LLGuidanceBackend) -> None:
    """G03"""
    matcher = backend.compile(of_schema({"type": "string", "minLength": 10**9})).new_matcher()
    assert any(matcher.bitmask())


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": "integer"}])
def test_no_number_is_endless(
    schema: Schema, backend: LLGuidanceBackend, vocabulary: GrammarVocabulary
) -> None:
    """G05: a model that likes digits best comes to an end."""
    matcher = backend.compile(of_schema(schema)).new_matcher()
    digits = [i for i, token in enumerate(vocabulary.tokens) if token.isdigit()]
    others = [i for i, token in enumerate(vocabulary.tokens) if token in (b".", b"e", b"-")]
    text = b""
    while not matcher.is_terminated:
        bits = int.from_bytes(matcher.bitmask(), "little")
        wanted = [i for i in (*digits, *others) if bits >> i & 1]
        if not wanted:
            assert bits >> vocabulary.end_ids[0] & 1
            break
        matcher.accept_tokens(wanted[:1])
        text += vocabulary.tokens[wanted[0]]
        assert len(text) < MAX_NUMBER_BYTES + 10
    json.loads(text)


def test_a_minimum_may_ask_for_a_longer_number(backend: LLGuidanceBackend, walker: Walker) -> None:
    schema = {"type": "integer", "minimum": 10**17, "maximum": 10**18}
    assert int(walker.write(backend.compile(of_schema(schema)))[0]) >= 10**17


def test_digits_in_a_string_are_no_number(backend: LLGuidanceBackend, walker: Walker) -> None:
    schema = {"type": "string", "pattern": "^[0-9]{60}$"}
    assert len(walker.write(backend.compile(of_schema(schema)))[0]) == 62


@pytest.mark.parametrize(
    "choices",
    [
        ("yes", "no"),
        ("a", "ab", "abc"),
        ("a🫠龜🥹 é b",),
        ("I am testing the spaces",),
        (r"\d+ [x] (y) {2} ^$ . * ? | # & ~ - /", "tab\tand\nline"),
        ("<|im_end|> is text", '"quoted"'),
        ("", "x"),
    ],
)
def test_choices(choices: tuple[str, ...], backend: LLGuidanceBackend, walker: Walker) -> None:
    grammar = backend.compile(StructuredOutputsParams(choice=choices))
    seen = {walker.write(grammar)[0].decode() for _ in range(20)}
    assert seen <= set(choices)
    assert len(seen) > len(choices) / 2


@pytest.mark.parametrize("text", ["I am testing the spaces", "hello", "a🫠龜🥹 é b", "x <s> y"])
def test_a_tokenizer_that_puts_spaces_in_front(
    text: str, spm_path: Path, spm_tokenizer: Tokenizer
) -> None:
    """T01 and T03: what is forced has the bytes of the text, whatever the tokenizer adds."""
    spec = _with_vocab_size(tiny_spec(), spm_tokenizer.vocab_size)
    vocabulary = model_vocabulary(spm_tokenizer, spec)
    grammar = LLGuidanceBackend(lambda: vocabulary).compile(StructuredOutputsParams(choice=(text,)))
    matcher = grammar.new_matcher()
    token_ids: list[int] = []
    while not matcher.is_terminated:
        bits = int.from_bytes(matcher.bitmask(), "little")
        token_ids.append((bits & -bits).bit_length() - 1)
        matcher.accept_tokens(token_ids[-1:])
        token_ids += matcher.take_forced_tokens()
    assert spm_tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("expression", [r"\d{3}-\d{4}", "^a+b?$", r"(yes|no)\.", "[^x]{2}"])
def test_regular_expressions(expression: str, backend: LLGuidanceBackend, walker: Walker) -> None:
    grammar = backend.compile(StructuredOutputsParams(regex=expression))
    for _ in range(5):
        assert re.fullmatch(expression, walker.write(grammar)[0].decode())


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= "x" digits\ndigits ::= [0-9] [0-9]', r"x\d\d"),
        ('start: "x" DIGIT DIGIT\nDIGIT: /[0-9]/', r"x\d\d"),
        ('start: "<" %json {"type": "integer", "minimum": 1, "maximum": 9} ">"', r"<\d>"),
        ('?start: pair ("," pair)?\npair: "(" start? ")"', r"[(),]+"),
    ],
)
def test_grammars(grammar: str, expected: str, backend: LLGuidanceBackend, walker: Walker) -> None:
    compiled = backend.compile(StructuredOutputsParams(grammar=grammar))
    for _ in range(5):
        assert re.fullmatch(expected, walker.write(compiled)[0].decode())


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": 'root ::= "x'},
        {"grammar": "root ::= missing"},
        {"grammar": "start: missing"},
        {"grammar": "start: start"},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"regex": "[a"},
        {"regex": r"(a)\1"},
        {"regex": "(?=a)"},
        {"regex": "(" * 30_000 + ")" * 30_000},
    ],
)
def test_bad_grammars_are_refused(fields: dict[str, str], backend: LLGuidanceBackend) -> None:
    """G01 and X07"""
    (kind,) = fields
    with pytest.raises(InvalidRequestError, match=kind) as caught:
        backend.compile(StructuredOutputsParams(**fields))
    assert len(caught.value.message) < 1000


def test_a_grammar_that_explodes_is_the_requests_own_fault(backend: LLGuidanceBackend) -> None:
    rules = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60))
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        backend.compile(StructuredOutputsParams(grammar=f'start: r0\n{rules}r60: "x"'))


def test_forced_tokens_save_steps(backend: LLGuidanceBackend, walker: Walker) -> None:
    schema = SCHEMAS["moderation"]
    text, num_forced = walker.write(backend.compile(of_schema(schema)))
    assert json.loads(text)
    assert num_forced > 10


def test_a_resumed_answer_goes_on_as_it_would_have(
    backend: LLGuidanceBackend, vocabulary: GrammarVocabulary
) -> None:
    """A matcher that accepts what another one accepted and forced is where that one is."""
    grammar = backend.compile(of_schema(SCHEMAS["invoice"]))
    one = grammar.new_matcher()
    token_ids: list[int] = []
    while len(token_ids) < 40 and not one.is_terminated:
        bits = int.from_bytes(one.bitmask(), "little")
        token_id = next(i for i in range(len(vocabulary.tokens)) if bits >> i & 1)
        one.accept_tokens([token_id])
        token_ids += [token_id, *one.take_forced_tokens()]
        other = grammar.new_matcher()
        other.accept_tokens(token_ids)
        assert other.bitmask() == one.bitmask()
        assert other.is_terminated == one.is_terminated


def test_a_token_that_is_not_allowed_is_an_error(
    backend: LLGuidanceBackend, starter_tokenizer: Tokenizer
) -> None:
    matcher = backend.compile(StructuredOutputsParams(choice=("yes",))).new_matcher()
    with pytest.raises(ValueError, match=r"."):
        matcher.accept_tokens(starter_tokenizer.encode("no"))


def test_matchers_of_one_grammar_know_nothing_of_each_other(
    backend: LLGuidanceBackend, starter_tokenizer: Tokenizer
) -> None:
    grammar = backend.compile(StructuredOutputsParams(choice=("yes", "no")))
    one, two = grammar.new_matcher(), grammar.new_matcher()
    one.accept_tokens(starter_tokenizer.encode("yes"))
    assert one.is_terminated
    assert not two.is_terminated
    assert two.bitmask() == grammar.new_matcher().bitmask()


def test_a_constraint_may_begin_after_a_marker(
    backend: LLGuidanceBackend, starter_tokenizer: Tokenizer, vocabulary: GrammarVocabulary
) -> None:
    params = StructuredOutputsParams(choice=("yes", "no"), after="</think>")
    matcher = backend.compile(params).new_matcher()
    end = vocabulary.end_ids[0]
    for token_id in starter_tokenizer.encode("Let me think. </thin </think>"):
        free = int.from_bytes(matcher.bitmask(), "little")
        assert not free >> end & 1, "the answer may not end before its constraint began"
        matcher.accept_tokens([token_id])
        assert matcher.take_forced_tokens() == []
    assert not matcher.is_terminated
    bits = int.from_bytes(matcher.bitmask(), "little")
    assert bits.bit_count() < 10
    matcher.accept_tokens(starter_tokenizer.encode("no"))
    assert matcher.is_terminated


def test_masks_cover_what_tokenizer_and_logits_share(starter_path, starter_tokenizer) -> None:
    spec = read_model_spec(starter_path)
    wider = model_vocabulary(starter_tokenizer, _with_vocab_size(spec, spec.vocab_size + 77))
    narrower = model_vocabulary(starter_tokenizer, _with_vocab_size(spec, 5000))
    for vocabulary, size in ((wider, starter_tokenizer.vocab_size), (narrower, 5000)):
        grammar = LLGuidanceBackend(lambda v=vocabulary: v).compile(of_schema({"type": "string"}))
        mask = grammar.new_matcher().bitmask()
        assert len(mask) == 4 * -(-size // 32)
        assert int.from_bytes(mask, "little").bit_length() <= size


def test_a_model_without_an_end_token_is_refused(starter_path, starter_tokenizer) -> None:
    spec = _with_vocab_size(read_model_spec(starter_path), 1)
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        model_vocabulary(starter_tokenizer, spec)


def _with_vocab_size(spec, vocab_size: int):
    import msgspec

    return msgspec.structs.replace(spec, vocab_size=vocab_size)
