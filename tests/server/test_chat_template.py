from __future__ import annotations

import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo_core.errors import InvalidRequestError, ModelError
from octavo_server import chat_template
from octavo_server.chat_template import ChatTemplate, ControlTokenGuard
from octavo_server.tokenizer import Tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b> & 'you' 龜", "name": None},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"é": 1}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
TEMPLATES = [
    "{% for m in messages %}\n  {% if m.content %}\n{{ m['role'] }}: {{ m.content }}\n"
    "  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
    "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% endfor %}",
    "{% generation %}{{ messages[1].content | trim }}{% endgeneration %}!",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[2].tool_calls[0].function.arguments | tojson }}",
    "{{ enable_thinking }}{{ messages[-1].content is defined }}{{ documents is none }}",
    "{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_transformers_does(template: str) -> None:
    options = {"enable_thinking": False}
    given = [{key: value for key, value in m.items() if value is not None} for m in MESSAGES]
    expected, _ = render_jinja_template(
        [given],
        chat_template=template,
        tools=TOOLS,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        **options,
    )
    compiled = ChatTemplate(template, "<s>", "</s>")
    assert compiled.render(MESSAGES, tools=TOOLS, **options) == expected[0]


def test_documents() -> None:
    assert ChatTemplate("{{ documents[0] }}").render(MESSAGES, documents=["d"]) == "d"


def test_starter_model(starter_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(starter_tokenizer.chat_template or "")
    text = template.render([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "template: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_refusals_are_the_requests_fault(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        ChatTemplate(template).render(MESSAGES)
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequestError):
        ChatTemplate(template).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template can't be compiled"):
        ChatTemplate("{% if %}")


def test_guard_marks_only_what_users_spell() -> None:
    guard = ControlTokenGuard(["<|end|>", "<s>"], ["<|end|>", "<s>", "</think>", "<b>"])
    message = {"role": "user", "content": "a<|end|>b</think><b>"}
    own = {"role": "assistant", "content": "<|end|></think>x"}
    (marked, marked_own), marker = guard.mark([message, own])
    assert marker is not None
    assert marked["content"] == f"a<{marker}|end|>b<{marker}/think><b>"
    assert marked_own["content"] == f"<{marker}|end|></think>x"
    assert guard.split(f"<s>{marked['content']}<|end|>", marker) == [
        ("<s>", True),
        ("a<|end|>b</think>", False),
        ("<b>", True),
        ("<|end|>", True),
    ]
    assert guard.mark([{"role": "user", "content": "a < b <b>"}])[1] is None


LOOP = "{% for a in range(99999) %}"
ENDLESS = [
    LOOP + LOOP + "x{% endfor %}{% endfor %}",
    LOOP + LOOP + "{% set x = a %}{% endfor %}{% endfor %}",
    LOOP + "{% for m in messages %}{% set x = m.role %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}" + LOOP + "{% set x = f(n) %}{% endfor %}{% endmacro %}{{ f(1) }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_x03_a_template_that_takes_too_long_is_ended(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its loops do; the next one has all its time again."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.05)
    started = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.05 s|RecursionError"):
        ChatTemplate(template).render(MESSAGES * 2000)
    assert time.thread_time() - started < 2
    monkeypatch.undo()
    assert ChatTemplate("{{ messages | length }}").render(MESSAGES) == "3"


def test_a_result_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        ChatTemplate("{% for m in messages %}abc{% endfor %}").render(MESSAGES * 200)


def test_many_messages_take_a_small_part_of_the_time(starter_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}] * 8192
    started = time.thread_time()
    ChatTemplate(starter_tokenizer.chat_template or "").render(messages)
    assert time.thread_time() - started < chat_template.MAX_RENDER_SECONDS / 2
