from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from octavo_core.errors import ModelError
from octavo_server import gguf_tokenizer
from octavo_server.tokenizer import Tokenizer, load_tokenizer
from support import spm
from support.gguf_reader import QuickReader
from support.gguf_writer import llama_metadata, write_gguf
from support.tiny_models import write_spm

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\n\n\nnewlines \r\n end ",
    "I'll say it's they've won't I'M",
    "0 1 12 123 1234567890 3.14159 ½ ² Ⅷ ٣٤٥",
    "def f(x):\n    return x**2  # comment\n",
    '{"key": ["value", 1.5e-3, null]}',
    "naïve café Straße ŒUVRE \u0301combining e\u0301",
    "今天天气很好。日本語のテキスト 한국어",
    "emoji 😀👩‍👩‍👧‍👦 🫠🥹 龜",
    "עברית العربية हिन्दी ไทย မြန်မာ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>a/b<file_sep>",
    "<|im_start |> < |im_end|>",
    "\u200b\u00a0\ufeff\u2028zero",
    "https://example.com/a?b=c&d=1#e",
    "a" * 300,
]


@pytest.fixture(scope="module")
def reference(starter_path: Path) -> Any:
    """Transformers' reading of the file, with the pre-tokenizer that the model was published with.

    Its own conversion does not know ``smollm`` and leaves numbers whole.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", QuickReader)
        folder, name = str(starter_path.parent), starter_path.name
        loaded = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    backend = loaded.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.normalizer = None
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_starter_model_tokenizes_as_published(
    starter_tokenizer: Tokenizer, reference: Any, text: str
) -> None:
    ids = starter_tokenizer.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert starter_tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(max_size=40))
def test_starter_model_tokenizes_any_text(
    starter_tokenizer: Tokenizer, reference: Any, text: str
) -> None:
    # The text may not come back: the vocabulary lacks a few control characters.
    expected = reference.encode(text, add_special_tokens=False).ids
    assert starter_tokenizer.encode(text) == expected


def test_starter_model_special_tokens(starter_tokenizer: Tokenizer) -> None:
    assert starter_tokenizer.vocab_size == 49152
    assert starter_tokenizer.bos_token == "<|im_start|>"
    assert starter_tokenizer.bos_token_id == 1
    assert starter_tokenizer.eos_token_ids == (2,)
    assert starter_tokenizer.is_special(2)
    assert not starter_tokenizer.is_special(4093)
    assert "add_generation_prompt" in (starter_tokenizer.chat_template or "")
    # add_bos_token is false in the file.
    assert starter_tokenizer.encode("hi") == starter_tokenizer.encode("hi", False)


# SentencePiece


@given(text=st.text(alphabet="abesthI am1é,龜🫠\n", max_size=30))
def test_sentencepiece_joins_as_sentencepiece_does(spm_tokenizer: Tokenizer, text: str) -> None:
    assert spm_tokenizer.encode(text, add_special_tokens=False) == spm.encode(text)


def test_sentencepiece_adds_bos_and_restores_the_text(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode("I am testing the spaces 🫠")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert spm_tokenizer.decode(ids) == "I am testing the spaces 🫠"


def test_flags_of_the_file_are_heeded(tmp_path: Path) -> None:
    path = write_spm(
        tmp_path / "m.gguf",
        **{
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
        },
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("a test") == [*spm.encode("a test", add_space_prefix=False), 2]
    assert tokenizer.decode(tokenizer.encode(" a test")) == " a test"


# Pre-tokenizers


def byte_level_file(path: Path, **changes: Any) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = llama_metadata(
        **{
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet, "ab", "<|end|>"],
            "tokenizer.ggml.token_type": [1] * 257 + [3],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 257,
            "tokenizer.ggml.eos_token_id": 257,
            **changes,
        }
    )
    return write_gguf(path, {k: v for k, v in metadata.items() if v is not None}, {})


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "Ġok", "!!", "ĊĊ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!!", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "Ġok", "!!ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!!ĊĊ"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġok", "!!ĊĊ"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(byte_level_file(tmp_path / "m.gguf", **{"tokenizer.ggml.pre": pre}))
    found = tokenizer.backend.pre_tokenizer.pre_tokenize_str("It's 12345 ok!!\n\n")
    assert [piece for piece, _ in found] == pieces


def test_only_llama3_adds_bos_without_being_told(tmp_path: Path) -> None:
    for pre, expected in (("llama-bpe", [257]), ("qwen2", [])):
        path = byte_level_file(tmp_path / f"{pre}.gguf", **{"tokenizer.ggml.pre": pre})
        assert load_tokenizer(path).encode("") == expected


# Damaged and unknown files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, r"tokenizer.ggml.pre 'martian' is not supported; supported: .*smollm"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "merges has 'ab'"),
        ({"merges": ["a zz"]}, "merges do not fit the tokens"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of str"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 items for 258 tokens"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "m.gguf"
    byte_level_file(path, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    with pytest.raises(ModelError, match=message):
        load_tokenizer(path)


def test_more_tokens_than_embedding_rows_is_refused(tmp_path: Path) -> None:
    path = byte_level_file(tmp_path / "m.gguf")
    header = gguf_tokenizer.read_gguf_header(path)
    write_gguf(path, header.metadata, {"token_embd.weight": ((100, 32), 0, bytes(100 * 32 * 4))})
    with pytest.raises(
        ModelError, match=r"has 258 tokens, but token_embd.weight has only 100 rows"
    ):
        load_tokenizer(path)


def test_special_id_outside_the_vocabulary_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = byte_level_file(tmp_path / "m.gguf", **{"tokenizer.ggml.eos_token_id": 32000})
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id == 257
    assert "eos_token_id is 32000, outside the vocabulary of 258 tokens" in caplog.text
    assert len(caplog.records) == 1


# The cache


def test_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spm_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    first = load_tokenizer(spm_path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "convert", lambda header: pytest.fail("converted again"))
        second = load_tokenizer(spm_path)
    assert second.encode("I am testing 🫠") == first.encode("I am testing 🫠")
    assert second.eos_token_ids == first.eos_token_ids == (2,)
    # A cache file that is cut short is made again.
    (file,) = (tmp_path / "cache" / "tokenizers").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert load_tokenizer(spm_path).encode("I") == first.encode("I")
    assert file.stat().st_size > 100


def test_another_file_is_not_the_cached_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    path = byte_level_file(tmp_path / "m.gguf")
    assert load_tokenizer(path).encode("ab") == [256]
    byte_level_file(path, **{"tokenizer.ggml.merges": ["b a"]})  # and "ba" is not a token
    with pytest.raises(ModelError, match="merges do not fit"):
        load_tokenizer(path)


def test_works_without_a_cache_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spm_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(spm_path).encode("I")
    assert len(caplog.records) == 1
    assert "OCTAVO_CACHE_DIR" in caplog.text
