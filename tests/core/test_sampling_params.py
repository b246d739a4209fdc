import math

import msgspec
import pytest

from octavo_core.errors import InvalidRequestError
from octavo_core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", 1 << 63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),  # above max_tokens
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 257,)),
        ("stop_token_ids", (1,) * 1025),
        ("n", 1.5),
        ("n", True),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("max_tokens", 2.5),
        ("logprobs", True),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", True),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [1]),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", ("a",)),
        ("bad_words", ("",)),
        ("bad_words", "word"),
        ("bad_words", ("x",) * 129),
        ("bad_words", ("x" * 257,)),
        ("bad_words_token_ids", ((1, "a"),)),
        ("logprob_token_ids", ()),
        ("logprob_token_ids", (1,) * 129),
        ("logprob_token_ids", ("a",)),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", 1_000_000),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(field: str, value: object) -> None:
    """Cases S11 (not finite) and X09 (prompt_logprobs without a limit) among them."""
    with pytest.raises(InvalidRequestError, match=field) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop=("x",), detokenize=False)


def test_one_stop_string_and_lists_are_taken_for_what_they_mean() -> None:
    params = SamplingParams(stop="Q R", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("Q R",), (1, 2))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_none_and_lists_mean_what_they_mean_to_users_of_vllm() -> None:
    params = SamplingParams(
        stop=None,  # type: ignore[arg-type]
        stop_token_ids=None,  # type: ignore[arg-type]
        bad_words=None,  # type: ignore[arg-type]
        allowed_token_ids=[3],  # type: ignore[arg-type]
        logit_bias=None,
    )
    assert params == SamplingParams(allowed_token_ids=(3,))


def test_named_tokens_take_the_place_of_the_likeliest() -> None:
    assert SamplingParams(logprob_token_ids=(4, 5)).num_logprobs == 2
    assert SamplingParams(logprob_token_ids=(4, 5), logprobs=2).num_logprobs == 2
    assert SamplingParams(logprobs=0).num_logprobs == 0
    assert SamplingParams().num_logprobs is None
    with pytest.raises(InvalidRequestError, match="logprobs is 1; it must be 2"):
        SamplingParams(logprob_token_ids=(4, 5), logprobs=1)


def test_rules_on_logits_cross_the_wire() -> None:
    params = SamplingParams(
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias={7: -100, 8: 0.25},
        allowed_token_ids=(7, 8, 9),
        bad_words=("a b",),
        bad_words_token_ids=((1, 2), (3,)),
        prompt_logprobs=0,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_limits_hold_on_the_wire_too() -> None:
    params = SamplingParams(temperature=0.5, stop=("a",), seed=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    wrong = msgspec.msgpack.encode({"temperature": 5.0})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wrong, type=SamplingParams)
