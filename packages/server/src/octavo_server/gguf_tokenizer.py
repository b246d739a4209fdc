"""The tokenizer inside a GGUF file.

A GGUF file lists tokens with their kinds, and either BPE merges (model ``gpt2``) or
SentencePiece scores (model ``llama``). Both become a tokenizer of the `tokenizers`
library. That takes a while for large vocabularies, so the result is kept in the
cache folder.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUFHeader, read_gguf_header
from octavo_server.cache_dir import cache_dir, write_atomically
from octavo_server.tokenizer import Tokenizer, choose_chat_template, set_bos_eos

logger = logging.getLogger(__name__)

# Part of the cache key: raise it whenever a conversion comes out differently.
CONVERSION_VERSION = 1

# Kinds of tokens, tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE_MARK = "▁"  # SentencePiece's spelling of a space

# How a text is cut before byte-level BPE. Each is the published pre-tokenizer of the
# model family that tokenizer.ggml.pre names.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _PreTokenizer(NamedTuple):
    """One family's way of cutting a text.

    Attributes:
        split: Regular expression of the pieces; None means GPT-2's own.
        digits: Cut every digit off first.
        nfc: Normalize to Unicode's NFC first.
        ignore_merges: A piece that is in the vocabulary is one token, whatever the merges say.
        add_bos: Whether BOS is added if the file does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(digits=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, nfc=True)

PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS._replace(nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _PreTokenizer(split=_LLAMA3_SPLIT),
    "dbrx": _PreTokenizer(split=_LLAMA3_SPLIT),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer(split=_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a .gguf file, from the cache folder if it was converted before.

    Raises:
        ModelError: The file is damaged, or its tokenizer is of a kind that is not supported.
    """
    cached = _cache_file(path)
    converted = _read_cache(cached)
    if converted is None:
        converted = convert(read_gguf_header(path))
        _write_cache(cached, converted)
    return Tokenizer(
        tokenizers.Tokenizer.from_str(converted.tokenizer_json),
        bos_token=converted.bos_token,
        eos_token=converted.eos_token,
        eos_token_ids=converted.eos_token_ids,
        chat_template=converted.chat_template,
    )


class ConvertedTokenizer(msgspec.Struct, frozen=True):
    """A GGUF file's tokenizer in the form of the `tokenizers` library.

    Attributes:
        tokenizer_json: Contents of a ``tokenizer.json``.
    """

    tokenizer_json: str
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def convert(header: GGUFHeader) -> ConvertedTokenizer:
    """Convert the tokenizer that a file's metadata describes.

    Raises:
        ModelError: Names the metadata key that is missing, wrong or not supported.
    """
    vocabulary = _Vocabulary(header)
    model = header.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend, add_bos = _byte_level_bpe(vocabulary)
    elif model == "llama":
        backend, add_bos = _sentencepiece_bpe(vocabulary), True
    else:
        raise vocabulary.error("model", f"{model!r} is not supported; supported: gpt2, llama")
    _mark_added_tokens(backend, vocabulary)
    bos, *ends = (vocabulary.special_id(name) for name in ("bos", "eos", "eot", "eom"))
    bos_token = None if bos is None else vocabulary.tokens[bos]
    eos_token = None if ends[0] is None else vocabulary.tokens[ends[0]]
    add_bos = bool(vocabulary.get("add_bos_token", add_bos)) and bos_token is not None
    add_eos = bool(vocabulary.get("add_eos_token", False)) and eos_token is not None
    set_bos_eos(backend, bos_token if add_bos else None, eos_token if add_eos else None)
    return ConvertedTokenizer(
        tokenizer_json=backend.to_str(),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        chat_template=choose_chat_template(header.metadata.get("tokenizer.chat_template")),
    )


class _Vocabulary:
    """The token lists of a header, checked against each other.

    Attributes:
        tokens: Text of each id.
        types: Kind of each id.
        ids: Text to id; of tokens that are there twice, the first.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self.tokens: list[str] = self.list_of("tokens", str)
        self.types: list[int] = self._optional_list("token_type", int, NORMAL)
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            self.ids.setdefault(token, token_id)
        if len(self.ids) < len(self.tokens):
            logger.warning(
                "%s: %d tokens are there twice; the first of each is used.",
                header.path,
                len(self.tokens) - len(self.ids),
            )
        embedding = header.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[0] < len(self.tokens):
            raise self.error(
                "tokens",
                f"has {len(self.tokens)} tokens, but token_embd.weight has only "
                f"{embedding.shape[0]} rows",
            )

    def get(self, name: str, default: Any = None) -> Any:
        return self._header.metadata.get(f"tokenizer.ggml.{name}", default)

    def error(self, name: str, reason: str) -> ModelError:
        key = f"tokenizer.ggml.{name}"
        return ModelError(f"{self._header.path}: {key} {reason}.", field=key)

    def list_of(self, name: str, item_type: type) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or not value:
            raise self.error(name, "is missing" if value is None else "is not a list with items")
        if not isinstance(value[0], item_type):
            raise self.error(name, f"is not a list of {item_type.__name__}")
        return value

    def scores(self) -> list[float]:
        return self._optional_list("scores", float, 0.0)

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token; one outside the vocabulary is not believed."""
        token_id = self.get(f"{name}_token_id")
        if token_id is None:
            return None
        if isinstance(token_id, int) and 0 <= token_id < len(self.tokens):
            return token_id
        logger.warning(
            "%s: tokenizer.ggml.%s_token_id is %s, outside the vocabulary of %d tokens; ignored.",
            self._header.path,
            name,
            token_id,
            len(self.tokens),
        )
        return None

    def _optional_list(self, name: str, item_type: type, default: Any) -> list[Any]:
        if self.get(name) is None:
            return [default] * len(self.tokens)
        value = self.list_of(name, item_type)
        if len(value) != len(self.tokens):
            raise self.error(name, f"has {len(value)} items for {len(self.tokens)} tokens")
        return value


def _byte_level_bpe(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Build a tokenizer of the GPT-2 kind; also return whether BOS is added by default."""
    name = vocabulary.get("pre")
    if name is None:
        logger.warning("tokenizer.ggml.pre is missing; GPT-2's pre-tokenizer is used.")
        name = "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise vocabulary.error("pre", f"{name!r} is not supported; supported: {known}")
    family = PRE_TOKENIZERS[name]
    merges = [_split_merge(vocabulary, merge) for merge in vocabulary.list_of("merges", str)]
    backend = _bpe(vocabulary, merges, ignore_merges=family.ignore_merges)
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if family.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if family.split is not None:
        steps.append(pre_tokenizers.Split(Regex(family.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, family.add_bos


def _split_merge(vocabulary: _Vocabulary, merge: str) -> tuple[str, str]:
    # The first token is never empty, so a space in front belongs to it.
    rest, space, right = merge[1:].partition(" ")
    if not space or not right:
        raise vocabulary.error("merges", f"has {merge!r}, which is not two tokens and a space")
    return merge[:1] + rest, right


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Build a tokenizer of the SentencePiece BPE kind, with merges made from the scores."""
    unknown = next((t for t, kind in _with_types(vocabulary) if kind == UNKNOWN), None)
    backend = _bpe(
        vocabulary,
        _merges_from_scores(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    back: list[decoders.Decoder] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if vocabulary.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        back.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(back)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return every way to make a token out of two, those that make better tokens first.

    SentencePiece joins, again and again, the neighbours whose union has the highest
    score. With merges ranked by that score, BPE does the same.
    """
    ids, scores = vocabulary.ids, vocabulary.scores()
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind in _with_types(vocabulary):
        if kind != NORMAL:
            continue
        score = scores[ids[token]]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _with_types(vocabulary: _Vocabulary) -> list[tuple[str, int]]:
    """Pair each token with its kind."""
    return list(zip(vocabulary.tokens, vocabulary.types, strict=True))


def _bpe(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise vocabulary.error("merges", f"do not fit the tokens: {error}") from error


def _mark_added_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tell the library which tokens are found in a text before it is cut."""
    special = [t for t, kind in _with_types(vocabulary) if kind in (CONTROL, UNKNOWN) and t]
    user_defined = [t for t, kind in _with_types(vocabulary) if kind == USER_DEFINED and t]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])


# The cache


def _cache_file(path: Path) -> Path:
    try:
        path = path.resolve(strict=True)
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.", field=str(path)) from error
    identity = (str(path), status.st_size, status.st_mtime_ns, tokenizers.__version__)
    digest = hashlib.sha256(repr((*identity, CONVERSION_VERSION)).encode()).hexdigest()
    return cache_dir() / "tokenizers" / f"{digest[:32]}.json"


def _read_cache(file: Path) -> ConvertedTokenizer | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ConvertedTokenizer)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write_cache(file: Path, converted: ConvertedTokenizer) -> None:
    try:
        write_atomically(file, msgspec.json.encode(converted))
    except OSError as error:
        logger.warning(
            "The converted tokenizer can't be kept in %s (%s); it is converted at every start. "
            "Set OCTAVO_CACHE_DIR to another folder.",
            file.parent,
            error.strerror,
        )
