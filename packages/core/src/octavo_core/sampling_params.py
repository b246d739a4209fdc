"""How one request wants its tokens chosen."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
SEED_BITS = 63

# A temperature under this is greedy. Who asks for 1e-4 means 0, and dividing by it would
# blow rounding errors up into choices.
GREEDY_TEMPERATURE = 0.01


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the names and defaults that users of vLLM know.

    Attributes:
        n: How many answers to the same prompt, 1 to 128.
        temperature: 0 is greedy, and so is everything under 0.01; at most 2.
        top_p: Keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: Keep this many tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this share as likely as the likeliest, in [0, 1].
        seed: Makes the answer reproducible whatever runs beside it; None draws one.
        max_tokens: Most tokens to generate; None means what the context leaves.
        min_tokens: No end-of-sequence or stop token before this many tokens.
        stop: Strings that end the answer; they are not part of it unless
            ``include_stop_str_in_output``.
        stop_token_ids: Token ids that end the answer.
        ignore_eos: Go on after the model's end-of-sequence token.
        logprobs: How many alternatives to report for each token (0 reports the
            chosen one alone), 0 to 20; None reports nothing. Values are raw:
            taken before temperature and filters.
        detokenize: False leaves the text empty (token ids only).
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the matched stop string in the text.
        eos_token_ids: The model's end-of-sequence ids. Filled in by the input
            processor, not by users.
        structured_outputs: What the text has to look like; None leaves it free.

    Raises:
        InvalidRequestError: A value is outside its limits.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    eos_token_ids: tuple[int, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_types()
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _invalid("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k < -1:
            raise _invalid("top_k", self.top_k, "-1 or 0 (off), or at least 1")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _invalid("max_tokens", self.max_tokens, "at least 1")
        if self.min_tokens < 0:
            raise _invalid("min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_stop(self.stop)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _invalid(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need the text: set detokenize to true, or use stop_token_ids.",
                field="stop",
            )

    def _check_types(self) -> None:
        """Refuse values of a wrong type, which a constructor takes without a word.

        One stop string, and lists in place of tuples, are taken for what they mean.
        """
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids", "eos_token_ids"):
            value = getattr(self, field)
            if isinstance(value, list):
                msgspec.structs.force_setattr(self, field, tuple(value))
        for field, (is_right, what) in _FIELD_TYPES.items():
            value = getattr(self, field)
            if not is_right(value):
                raise _invalid(field, repr(value), what)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _is_integers(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_integer, value))


_INTEGER = (_is_integer, "an integer")
_OPTIONAL_INTEGER = (lambda value: value is None or _is_integer(value), "an integer or None")
_NUMBER = (_is_number, "a number")
_BOOL = (_is_bool, "True or False")
_INTEGERS = (_is_integers, "a list of integers")

# Field to what its value has to be: a check, and the words for it.
_FIELD_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "n": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "min_p": _NUMBER,
    "seed": _OPTIONAL_INTEGER,
    "max_tokens": _OPTIONAL_INTEGER,
    "min_tokens": _INTEGER,
    "stop": (_is_strings, "a string or a list of strings"),
    "stop_token_ids": _INTEGERS,
    "ignore_eos": _BOOL,
    "logprobs": _OPTIONAL_INTEGER,
    "detokenize": _BOOL,
    "skip_special_tokens": _BOOL,
    "include_stop_str_in_output": _BOOL,
    "eos_token_ids": _INTEGERS,
    "structured_outputs": (
        lambda value: value is None or isinstance(value, StructuredOutputsParams),
        "StructuredOutputsParams or None",
    ),
}


def _check_range(field: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails too.
    if not (math.isfinite(value) and low <= value <= high):
        raise _invalid(field, value, f"between {low} and {high}")


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for string in stop:
        if not string:
            raise _invalid("stop", "''", "strings that are not empty")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise _invalid(
                "stop", f"a string of {len(string)} characters", f"at most {MAX_STOP_STRING_CHARS}"
            )


def _invalid(field: str, value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} is {value}; it must be {limit}.", field=field)
