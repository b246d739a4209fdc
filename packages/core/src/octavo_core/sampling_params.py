"""How one request wants its tokens chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized

import msgspec

from octavo_core.errors import InvalidRequestError
from octavo_core.structured_outputs import StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_REPETITION_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 20  # more than any vocabulary
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
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
        presence_penalty: Taken off the logit of each token that the answer has already,
            in [-2, 2].
        frequency_penalty: The same, once for each time that it has it, in [-2, 2].
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens
            that the prompt or the answer has; above 0, up to 2, and 1 is off.
        logit_bias: Token ids to numbers that are added to their logits, each in
            [-100, 100]; at most 1024 ids.
        allowed_token_ids: The only tokens that may be chosen; None allows all.
        bad_words: Strings that the answer must not have, as words of their own or as a
            part of one: the last token of each of their spellings is forbidden where
            the tokens before it are there. At most 128, of 1 to 256 characters.
        seed: Makes the answer reproducible whatever runs beside it; None draws one.
        max_tokens: Most tokens to generate; None means what the context leaves.
        min_tokens: No end-of-sequence or stop token before this many tokens.
        stop: Strings that end the answer; they are not part of it unless
            ``include_stop_str_in_output``.
        stop_token_ids: Token ids that end the answer.
        ignore_eos: Go on after the model's end-of-sequence token.
        logprobs: How many alternatives to report for each token (0 reports the
            chosen one alone), 0 to 20; None reports nothing. Values are raw:
            taken before temperature, penalties and filters.
        prompt_logprobs: The same for the prompt's tokens, of which the first has none.
        logprob_token_ids: Report these tokens at each position of the answer, in place of
            the likeliest ones; 1 to 128. ``logprobs``, if given too, must be their number.
        detokenize: False leaves the text empty (token ids only).
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the matched stop string in the text.
        eos_token_ids: The model's end-of-sequence ids. Filled in by the input
            processor, not by users.
        bad_words_token_ids: The spellings of ``bad_words``, filled in likewise.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None

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
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                _check_range(field, value, 0, MAX_LOGPROBS)
        if self.logprob_token_ids is not None:
            self._check_logprob_token_ids(len(self.logprob_token_ids))
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self._check_logit_rules()
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need the text: set detokenize to true, or use stop_token_ids.",
                field="stop",
            )

    @property
    def num_logprobs(self) -> int | None:
        """How many tokens to report beside each of the answer's; None reports nothing."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def _check_logprob_token_ids(self, count: int) -> None:
        if not 1 <= count <= MAX_LOGPROB_TOKEN_IDS:
            limit = f"1 to {MAX_LOGPROB_TOKEN_IDS} ids"
            raise _invalid("logprob_token_ids", f"{count} ids", limit)
        if self.logprobs not in (None, count):
            raise _invalid("logprobs", self.logprobs, f"{count}, as many as logprob_token_ids")

    def _check_logit_rules(self) -> None:
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0.0:
            limit = f"above 0 and at most {MAX_REPETITION_PENALTY}"
            raise _invalid("repetition_penalty", self.repetition_penalty, limit)
        _check_count("logit_bias", self.logit_bias or (), MAX_LOGIT_BIAS_IDS)
        for token_id, bias in (self.logit_bias or {}).items():
            if not (math.isfinite(bias) and abs(bias) <= MAX_LOGIT_BIAS):
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} is {bias}; it must be between "
                    f"{-MAX_LOGIT_BIAS} and {MAX_LOGIT_BIAS}.",
                    field="logit_bias",
                )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise _invalid("allowed_token_ids", "empty", "at least one id, or None for all")
            _check_count("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)

    def _check_types(self) -> None:
        """Refuse values of a wrong type, which a constructor takes without a word.

        One stop string, lists in place of tuples, and None where there may be several, are
        taken for what they mean.
        """
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for field in _SEQUENCES:
            value = getattr(self, field)
            if value is None and field in ("stop", "stop_token_ids", "bad_words"):
                value = []
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


def _is_bias(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_integer(token_id) and _is_number(bias) for token_id, bias in value.items()
    )


_INTEGER = (_is_integer, "an integer")
_OPTIONAL_INTEGER = (lambda value: value is None or _is_integer(value), "an integer or None")
_NUMBER = (_is_number, "a number")
_BOOL = (_is_bool, "True or False")
_INTEGERS = (_is_integers, "a list of integers")
_OPTIONAL_INTEGERS = (
    lambda value: value is None or _is_integers(value),
    "a list of integers or None",
)
_STRINGS = (_is_strings, "a list of strings")

# Fields that may be given as lists.
_SEQUENCES = (
    *("stop", "stop_token_ids", "eos_token_ids", "allowed_token_ids", "bad_words"),
    "logprob_token_ids",
)

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
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "logit_bias": (
        lambda value: value is None or _is_bias(value),
        "a dict of token ids to numbers, or None",
    ),
    "allowed_token_ids": _OPTIONAL_INTEGERS,
    "bad_words": _STRINGS,
    "bad_words_token_ids": (
        lambda value: isinstance(value, tuple) and all(map(_is_integers, value)),
        "a tuple of tuples of integers",
    ),
    "prompt_logprobs": _OPTIONAL_INTEGER,
    "logprob_token_ids": _OPTIONAL_INTEGERS,
}


def _check_range(field: str, value: float, low: float, high: float) -> None:
    # Written so that NaN fails too.
    if not (math.isfinite(value) and low <= value <= high):
        raise _invalid(field, value, f"between {low} and {high}")


def _check_count(field: str, items: Sized, limit: int, what: str = "ids") -> None:
    if len(items) > limit:
        raise _invalid(field, f"{len(items)} {what}", f"at most {limit}")


def _check_strings(field: str, strings: tuple[str, ...], limit: int, max_chars: int) -> None:
    _check_count(field, strings, limit, "strings")
    for string in strings:
        if not string:
            raise _invalid(field, "''", "strings that are not empty")
        if len(string) > max_chars:
            raise _invalid(field, f"a string of {len(string)} characters", f"at most {max_chars}")


def _invalid(field: str, value: object, limit: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} is {value}; it must be {limit}.", field=field)
