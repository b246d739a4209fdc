from __future__ import annotations

from typing import Any

import pytest

from octavo_server.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


def ids(front: Any, **body: Any) -> list[int]:
    response = front.post("/tokenize", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    found: list[int] = answer["tokens"]
    return found


def test_a_prompt_and_back(front: Any) -> None:
    text = "größe 🥹<eos>"
    tokens = ids(front, prompt=text)
    assert len(tokens) == len(text.encode()) - len("<eos>") + 1
    back = front.post("/detokenize", {"tokens": tokens})
    assert back.json() == {"prompt": text}
    completion = front.post(
        "/v1/completions", {"prompt": text, "return_token_ids": True, "max_tokens": 1}
    )
    assert completion.json()["choices"][0]["prompt_token_ids"] == tokens


def test_pieces(front: Any) -> None:
    answer = front.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "Ġ", "b"]
    assert front.post("/tokenize", {"prompt": "a b"}).json()["token_strs"] is None


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_messages_become_what_a_chat_becomes(front: Any, add_generation_prompt: bool) -> None:
    """Case T11: a control token that is spelt out in a message stays text."""
    body = {
        "messages": [{"role": "user", "content": "hi<eos>"}],
        "add_generation_prompt": add_generation_prompt,
    }
    tokens = ids(front, **body)
    assert 256 not in tokens
    chat = front.post("/v1/chat/completions", body | {"return_token_ids": True, "max_tokens": 1})
    assert chat.json()["prompt_token_ids"] == tokens
    text = front.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "user=hi<eos>;" + "a=" * add_generation_prompt


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"continue_final_message": True},
        {"continue_final_message": True, "tools": [TOOL]},
        {"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": True}},
    ],
)
def test_a_chats_other_fields_count_too(front: Any, talker: Any, fields: dict[str, Any]) -> None:
    """With a template that knows tools, and with one that does not."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so <eos>"}]
    for served in (front, talker):
        body = {"messages": messages, **fields}
        tokens = served.post("/tokenize", body).json()["tokens"]
        assert 256 not in tokens
        chat = served.post(CHAT, body | {"return_token_ids": True, "max_tokens": 1}).json()
        assert chat["prompt_token_ids"] == tokens


def test_nothing_is_some_tokens_and_some_text(front: Any) -> None:
    assert ids(front, prompt="") == []
    assert front.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_prompt_may_be_longer_than_the_context(front: Any) -> None:
    assert len(ids(front, prompt="x" * 2000)) == 2000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
            "continue_final_message",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, None),
        ("/detokenize", {"tokens": ["a"]}, None),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(
    front: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = front.post(path, body)
    assert response.status_code == 400, response.text
    if param is not None:
        assert response.json()["error"]["param"] == param


def test_another_model(front: Any) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        assert front.post(path, body | {"model": "gpt-5"}).status_code == 404


def test_begin_of_sequence_is_added_to_a_text_once(spm_tokenizer: Tokenizer) -> None:
    """Case T09 in the library that the route calls: BOS once, and none if it is not wanted."""
    bos = spm_tokenizer.bos_token_id
    assert spm_tokenizer.encode("Hello", True).count(bos or -1) == 1
    assert spm_tokenizer.encode("Hello", False).count(bos or -1) == 0
