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
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(field: str, value: object) -> None:
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


def test_limits_hold_on_the_wire_too() -> None:
    params = SamplingParams(temperature=0.5, stop=("a",), seed=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    wrong = msgspec.msgpack.encode({"temperature": 5.0})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wrong, type=SamplingParams)
