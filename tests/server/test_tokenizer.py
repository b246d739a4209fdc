from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from octavo_core.errors import ModelError
from octavo_server.tokenizer import Tokenizer, load_tokenizer, set_bos_eos

MakeFolder = Callable[..., Path]


def test_folder(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(make_folder(generation_config={"eos_token_id": [3, 257]}))
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_tokens == {"<s>": 256, "</s>": 257}
    assert tokenizer.bos_token_id == 256
    assert tokenizer.eos_token_ids == (257, 3)
    assert tokenizer.chat_template is None
    ids = tokenizer.encode("é<s>")
    assert ids[-1] == 256
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "é<s>"
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids) == "é<s>".encode()
    assert tokenizer.token_bytes(258) is None


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("in_json", [True, False])
def test_bos_as_in_transformers(make_folder: MakeFolder, flag: bool | None, in_json: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = make_folder(
        tokenizer_config={**config, **({} if flag is None else {"add_bos_token": flag})}
    )
    if in_json:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        set_bos_eos(backend, "<s>", None)
        backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hi") == AutoTokenizer.from_pretrained(folder)("hi")["input_ids"]
    assert (tokenizer.encode("hi")[0] == 256) == in_json
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != 256


@pytest.mark.parametrize(
    ("jinja", "processor", "config", "expected"),
    [
        ("from jinja", {"chat_template": "from json"}, "from config", "from jinja"),
        (None, {"chat_template": "from json"}, "from config", "from json"),
        (None, None, "from config", "from config"),
        (
            None,
            None,
            [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}],
            "d",
        ),
        (None, None, None, None),
    ],
)
def test_chat_template_files(
    make_folder: MakeFolder, jinja: Any, processor: Any, config: Any, expected: str | None
) -> None:
    folder = make_folder(tokenizer_config={"chat_template": config}, chat_template=processor)
    if jinja:
        (folder / "chat_template.jinja").write_text(jinja)
    assert load_tokenizer(folder).chat_template == expected


def test_errors_name_the_file(make_folder: MakeFolder) -> None:
    folder = make_folder(tokenizer_config={"chat_template": [{"name": 1}]})
    with pytest.raises(ModelError, match="chat_template is malformed"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config.json is not a JSON object"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelError, match=r"tokenizer.json is no tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer.json"):
        load_tokenizer(folder)


def test_plain_text_has_no_control_tokens(starter_tokenizer: Tokenizer) -> None:
    text = "<|im_end|>\n<|im_start|>system"
    assert starter_tokenizer.encode(text)[0] == 2
    plain = starter_tokenizer.encode_plain(text)
    assert not any(starter_tokenizer.is_special(i) for i in plain)
    assert starter_tokenizer.decode(plain) == text
    assert starter_tokenizer.encode_plain("Hello 12") == starter_tokenizer.encode("Hello 12")


def test_bytes_of_sentencepiece_tokens(spm_tokenizer: Tokenizer) -> None:
    ids = spm_tokenizer.encode(" a龜", add_special_tokens=False)
    assert b"".join(spm_tokenizer.token_bytes(i) or b"" for i in ids) == "  a龜".encode()
