"""One face for every tokenizer, whatever file it came from.

The work is done by the `tokenizers` library. This module adds what serving needs on
top: the model's special tokens and chat template, and the exact bytes of a token,
without which half a character can't be told from a whole one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers.processors import TemplateProcessing

from octavo_core.errors import ConfigError, ModelError
from octavo_core.model_spec import read_json

MAX_TOKEN_ID = (1 << 24) - 1
"""The largest vocabularies have 2**18 tokens; writing a tokenizer down takes time for each id."""


class DecoderRule(NamedTuple):
    """How a tokenizer turns pieces into text, as far as that can be done piece by piece.

    Attributes:
        kind: ``byte_level``: pieces spell bytes in the alphabet of GPT-2.
            ``byte_fallback``: pieces are text, or a byte as ``<0x0A>`` (SentencePiece).
            ``other``: only the library knows.
        replacements: Pairs of old and new text in a piece, for ``byte_fallback``.
        strip: Character of which up to ``strip_count`` are dropped in front of the text.
    """

    kind: str
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    strip_count: int = 0


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: The library's tokenizer.
        bos_token: Text of the beginning-of-sequence token, if the model has one.
        eos_token: Text of the main end-of-sequence token.
        eos_token_ids: Every id that ends an answer.
        chat_template: Source of the jinja template.

    Attributes:
        vocab_size: Number of ids, added tokens included.
        special_tokens: Text to id of the control tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        self.chat_template = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        main_eos = [] if eos_token is None else [backend.token_to_id(eos_token)]
        self.eos_token_ids = tuple(
            dict.fromkeys(i for i in (*main_eos, *eos_token_ids) if i is not None)
        )
        self.added_tokens: dict[str, int] = {}
        self.special_tokens: dict[str, int] = {}
        for token_id, token in backend.get_added_tokens_decoder().items():
            self.added_tokens[token.content] = token_id
            if token.special:
                self.special_tokens[token.content] = token_id
        self._special_ids = frozenset(self.special_tokens.values())
        self.decoder_rule = _decoder_rule(backend)
        self._bytes: dict[int, bytes | None] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special_tokens: Add BOS and EOS where the model asks for them. Control
                tokens that are spelt out in `text` are recognised either way.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(
        self, first: str, second: str, add_special_tokens: bool = True
    ) -> tuple[list[int], int]:
        """Return the token ids of two texts as the model takes them together.

        Returns:
            The ids, and the position where the second text begins, for models that tell the
            two apart; else 0.
        """
        encoding = self.backend.encode(first, second, add_special_tokens=add_special_tokens)
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return for each token, without special ones, from where to where in `text` it is."""
        return self.backend.encode(text, add_special_tokens=False).offsets

    def encode_plain(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`, in which control tokens are nothing but letters."""
        return self._plain_backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids beyond the vocabulary have none."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, or None beyond the vocabulary."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes that a token adds to a text, or None beyond the vocabulary."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._compute_bytes(token_id)
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which `decode` leaves out by default."""
        return token_id in self._special_ids

    def _compute_bytes(self, token_id: int) -> bytes | None:
        piece = self.piece(token_id)
        if piece is None:
            return None
        if self.decoder_rule.kind == "byte_level":
            return byte_level_bytes(piece)
        if self.decoder_rule.kind == "byte_fallback":
            byte = fallback_byte(piece)
            if byte is not None:
                return bytes([byte])
            for old, new in self.decoder_rule.replacements:
                piece = piece.replace(old, new)
            return piece.encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # Built on the first text that spells a control token; few servers ever need it.
        state = json.loads(self.backend.to_str())
        state["added_tokens"] = []
        # A text that follows a control token is not the first one of the prompt.
        _replace_value(state, "prepend_scheme", "first", "never")
        return tokenizers.Tokenizer.from_str(json.dumps(state))


def _replace_value(node: Any, key: str, old: str, new: str) -> None:
    if isinstance(node, dict):
        if node.get(key) == old:
            node[key] = new
        for name in ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers"):
            _replace_value(node.get(name), key, old, new)
    elif isinstance(node, list):
        for item in node:
            _replace_value(item, key, old, new)


# Decoders


def _byte_alphabet() -> dict[str, int]:
    """The 256 characters in which GPT-2's vocabulary spells bytes.

    Printable Latin-1 characters stand for themselves; the others are numbered from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a piece spelt in GPT-2's byte alphabet.

    A piece with any other character (an added token) is taken as text, whole, as the
    library's decoder does.
    """
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """Return the byte that a piece such as ``<0x0A>`` stands for, or None for other pieces."""
    match = _FALLBACK_BYTE.fullmatch(piece)
    return int(match[1], 16) if match else None


def _decoder_rule(backend: tokenizers.Tokenizer) -> DecoderRule:
    if backend.decoder is None:
        return DecoderRule("other")
    state: Any = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderRule("byte_level")
    return _byte_fallback_rule(steps) or DecoderRule("other")


def _byte_fallback_rule(steps: list[dict[str, Any]]) -> DecoderRule | None:
    """Read ``Replace… ByteFallback Fuse [Strip]``, the decoder of SentencePiece models."""
    kinds = [step["type"] for step in steps]
    if "ByteFallback" not in kinds:
        return None
    start = kinds.index("ByteFallback")
    replaces, rest = steps[:start], steps[start + 1 :]
    if any(step["type"] != "Replace" or "String" not in step["pattern"] for step in replaces):
        return None
    if [step["type"] for step in rest] not in (["Fuse"], ["Fuse", "Strip"]):
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in replaces)
    if len(rest) == 1:
        return DecoderRule("byte_fallback", replacements)
    if rest[1]["stop"] != 0:
        return None
    return DecoderRule("byte_fallback", replacements, rest[1]["content"], rest[1]["start"])


# Loading


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder or a .gguf file.

    Raises:
        ModelError: Names the file that is missing or damaged, or what is not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    from octavo_server.gguf_tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(path)


def _load_folder(folder: Path) -> Tokenizer:
    # Whether BOS is added is up to tokenizer.json: like transformers, we don't ask the
    # add_bos_token of tokenizer_config.json, which is often stale.
    backend = _read_backend(folder / "tokenizer.json")
    config = read_json(folder / "tokenizer_config.json", {})
    special = read_json(folder / "special_tokens_map.json", {})
    bos_token = _token_text(config, special, "bos_token")
    eos_token = _token_text(config, special, "eos_token")
    return Tokenizer(
        backend,
        bos_token=bos_token,
        eos_token=eos_token,
        eos_token_ids=_generation_eos(folder),
        chat_template=_folder_chat_template(folder, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; other tokenizer formats are not supported.",
            field=path.name,
        ) from None
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.", field=path.name) from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
        # What is cut and what is filled up is not the file's to say.
        backend.no_truncation()
        backend.no_padding()
        _try_out(backend)
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises bare Exception and ValueError, and where it panics a BaseException.
    except BaseException as error:
        raise ModelError(f"{path} is no tokenizer: {error}.", field=path.name) from error
    return backend


def _try_out(backend: tokenizers.Tokenizer) -> None:
    """Use a tokenizer once, and look at its ids: some damage shows only then.

    Raises:
        Exception: The library's, or for two tokens of one id, or one beyond all vocabularies.
    """
    unknown = "a \ue000"  # a character that no vocabulary has
    backend.encode(unknown)
    backend.encode(unknown, unknown)
    ids = backend.get_vocab(with_added_tokens=False).values()
    if len(set(ids)) < len(ids):
        raise ValueError(f"{len(ids) - len(set(ids))} of its tokens have the id of another one")
    largest = max((*ids, *backend.get_added_tokens_decoder()), default=0)
    if largest > MAX_TOKEN_ID:
        raise ValueError(f"it has a token with the id {largest}; the largest is {MAX_TOKEN_ID}")


def set_bos_eos(
    backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None
) -> None:
    """Make `encode` put these tokens around a text; None puts nothing there."""
    tokens = [token for token in (bos_token, eos_token) if token is not None]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
    if any(token_id is None for _, token_id in ids):
        raise ModelError(f"the BOS or EOS token {tokens} is not in the vocabulary.")
    template = [*([bos_token] if bos_token else []), "$A", *([eos_token] if eos_token else [])]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=ids)


def _token_text(config: dict[str, Any], special: dict[str, Any], name: str) -> str | None:
    """Read a special token, which is a string or an object with its content."""
    value = config.get(name) or special.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _generation_eos(folder: Path) -> list[int]:
    value = read_json(folder / "generation_config.json", {}).get("eos_token_id")
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _folder_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} can't be read: {error}.", field=file.name) from error
    template = read_json(folder / "chat_template.json", {}).get("chat_template")
    return choose_chat_template(template or config.get("chat_template"))


def read_chat_template(path: str) -> str:
    """Return the template in a file that an operator has named.

    Raises:
        ConfigError: The file can't be read, or is no jinja template.
    """
    from octavo_server.chat_template import ChatTemplate

    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
        ChatTemplate(source)
    except (OSError, UnicodeDecodeError, ModelError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"--chat-template {path} can't be used: {str(reason).rstrip('.')}.",
            field="chat_template",
        ) from None
    return source


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def choose_chat_template(value: Any) -> str | None:
    """Return the template of a config entry: a string, or a list of named ones (``default``)."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = msgspec.convert(value, list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise ModelError(f"chat_template is malformed: {error}.", field="chat_template") from error
    by_name = {item.name: item.template for item in named}
    return by_name.get("default") or next(iter(by_name.values()), None)
