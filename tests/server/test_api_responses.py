"""``/v1/responses`` over HTTP, and through the official SDK.

The scripted model says what it is told to: ``say:Hello`` makes it answer ``Hello``.
"""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pydantic
import pytest

from support.streams import joined_response, named_events

PATH = "/v1/responses"
WRITE = '<tool_call>\n{"name": "write", "arguments": {"p": "x"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "name": "write",
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
    }
]


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"input": f"say:{text}", **fields}


def events_of(front: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = front.post(PATH, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def both(front: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Ask with and without a stream, see that both say the same, and return the response."""
    response = front.post(PATH, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    assert same_parts(joined_response(events_of(front, body))) == same_parts(whole)
    return whole


def same_parts(response: dict[str, Any]) -> dict[str, Any]:
    """All but ids, times and what came from the cache."""
    own = ("id", "created_at", "completed_at", "usage", "output")
    return {
        **{key: value for key, value in response.items() if key not in own},
        "output": [{**item, "id": "", "call_id": ""} for item in response["output"]],
        "usage": [response["usage"][key] for key in ("input_tokens", "output_tokens")],
    }


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item.get("content", ())]


def get(front: Any, path: str, **params: Any) -> httpx.Response:
    return httpx.get(f"{front.url}{PATH}/{path}", params=params, timeout=20)


def test_a_response(talker: Any) -> None:
    response = both(talker, say("Hello é", metadata={"a": "b"}, max_output_tokens=20))
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert response["status"] == "completed"
    assert (response["error"], response["incomplete_details"]) == (None, None)
    assert (response["metadata"], response["store"]) == ({"a": "b"}, True)
    (item,) = response["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello é", "annotations": [], "logprobs": []}
    assert item == {
        "type": "message",
        "role": "assistant",
        "content": [part],
        "status": "completed",
    }
    usage = response["usage"]
    assert usage["input_tokens"] == len("Hello é".encode())
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_an_answer_that_is_cut_off(talker: Any) -> None:
    response = both(talker, say("Hello", max_output_tokens=2))
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert texts(response) == ["He"]


def test_calls(talker: Any) -> None:
    response = both(talker, say(f"I write.\n{WRITE}", tools=TOOLS))
    message, call = response["output"]
    assert message["content"][0]["text"] == "I write."
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert (call["name"], call["arguments"]) == ("write", '{"p": "x"}')
    assert call["status"] == "completed"
    assert response["tools"][0]["name"] == "write"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "write", "parameters": {"p": "x"}}]'),
        ({"type": "function", "name": "write"}, '{"p": "x"}'),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "write"}],
            },
            '[{"name": "write", "parameters": {"p": "x"}}]',
        ),
    ],
)
def test_forced_calls(talker: Any, choice: Any, text: str) -> None:
    body = say(text, tools=TOOLS, tool_choice=choice, max_output_tokens=len(text) + 1)
    response = both(talker, body)
    assert [(item["name"], item["arguments"]) for item in response["output"]] == [
        ("write", '{"p": "x"}')
    ]
    assert response["tool_choice"] == choice


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_h19_without_tools_there_are_no_calls(talker: Any, fields: dict[str, Any]) -> None:
    response = both(talker, say(WRITE, **fields))
    assert [item["type"] for item in response["output"]] == ["message"]
    assert texts(response) == [WRITE]


def test_reasoning(talker: Any) -> None:
    response = both(talker, say("<think>Hm.</think>Yes."))
    reasoning, message = response["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_logprobs(talker: Any) -> None:
    body = say("Hi", top_logprobs=2, max_output_tokens=2)
    logprobs = both(talker, body)["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["H", "i"]
    assert len(logprobs[0]["top_logprobs"]) == 2


def test_items_reach_the_template(talker: Any) -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "T"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "write", "arguments": '{"p":1}'},
        {"type": "function_call_output", "call_id": "c", "output": "8"},
        {
            "type": "function_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "9"}],
        },
        {"role": "user", "content": "c"},
    ]
    body = {"input": items, "instructions": "I", "reasoning": {"effort": "none"}}
    assert texts(both(talker, body)) == [
        "system=I;system=D;user=a;assistant=Tbwrite([('p', 1)]);tool=8;tool=9;user=c;"
        "thinking=False;a="
    ]


def test_h19_a_conversation_goes_on_from_a_streamed_answer(talker: Any) -> None:
    first = joined_response(events_of(talker, say(f"<think>T</think>A{WRITE}", tools=TOOLS)))
    call_id = first["output"][-1]["call_id"]
    second = talker.post(
        PATH,
        {
            "previous_response_id": first["id"],
            "input": [{"type": "function_call_output", "call_id": call_id, "output": "8"}],
            "instructions": "I",
        },
    ).json()
    said = f"say:<think>T</think>A{WRITE}"
    so_far = f"user={said};assistant=TAwrite([('p', 'x')]);tool=8;"
    # What the model repeats is split into reasoning, text and calls again, but for tools.
    assert texts(second) == [f"system=I;{so_far}a="]
    assert second["previous_response_id"] == first["id"]
    third = talker.post(PATH, {"previous_response_id": second["id"], "input": "go on"}).json()
    assert texts(third) == [f"{so_far}assistant=system=I;{so_far}a=;user=go on;a="]


def test_h19_what_was_not_stored_is_not_found(talker: Any) -> None:
    unstored = both(talker, say("A", store=False))
    assert unstored["store"] is False
    for response_id in (unstored["id"], "resp_unknown"):
        response = talker.post(PATH, say("B", previous_response_id=response_id))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "previous_response_id"
        assert error["code"] == "previous_response_not_found"
        assert get(talker, response_id).status_code == 404


def test_a_stored_response_is_read_and_deleted(talker: Any) -> None:
    response = talker.post(PATH, say("A")).json()
    assert get(talker, response["id"]).json() == response
    deleted = httpx.delete(f"{talker.url}{PATH}/{response['id']}").json()
    assert deleted == {"id": response["id"], "object": "response.deleted", "deleted": True}
    assert get(talker, response["id"]).status_code == 404
    assert httpx.delete(f"{talker.url}{PATH}/{response['id']}").status_code == 404


def test_input_items_are_listed(talker: Any) -> None:
    first = talker.post(PATH, say("A")).json()
    second = talker.post(PATH, say("B", previous_response_id=first["id"])).json()
    path = f"{second['id']}/input_items"
    page = get(talker, path).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["say:B", "A", "say:A"]
    assert (page["object"], page["has_more"]) == ("list", False)
    page = get(talker, path, order="asc", limit=2).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["say:A", "A"]
    assert page["has_more"] is True
    page = get(talker, path, order="asc", limit=2, after=page["last_id"]).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["say:B"]
    assert get(talker, path, limit=0).status_code == 400
    assert get(talker, path, after="nope").status_code == 400


def test_the_store_is_bounded(start_front: Any) -> None:
    front = start_front(max_stored_responses=2).wait_ready()
    ids = [front.post(PATH, {"input": "x"}).json()["id"] for _ in range(3)]
    assert [get(front, response_id).status_code for response_id in ids] == [404, 200, 200]


def test_a_server_may_store_nothing(start_front: Any) -> None:
    front = start_front(max_stored_responses=0).wait_ready()
    response = front.post(PATH, {"input": "x"}).json()
    assert response["store"] is False
    assert get(front, response["id"]).status_code == 404
    refused = front.post(PATH, {"input": "x", "background": True})
    assert refused.status_code == 400
    assert "--max-stored-responses" in refused.json()["error"]["message"]


def wait_done(front: Any, response_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        response: dict[str, Any] = get(front, response_id).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.02)
    raise AssertionError(response)


def test_in_the_background(talker: Any) -> None:
    response = talker.post(PATH, say("slowly said", background=True)).json()
    assert response["status"] in ("queued", "in_progress")
    early = talker.post(PATH, say("B", previous_response_id=response["id"]))
    assert early.status_code == 400
    done = wait_done(talker, response["id"])
    assert done["status"] == "completed"
    assert texts(done) == ["slowly said"]
    events = named_events(get(talker, response["id"], stream="true").text)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1]["response"] == done
    rest = get(talker, response["id"], stream="true", starting_after=events[-2]["sequence_number"])
    assert json.loads(rest.text.split("\n")[1].removeprefix("data: ")) == events[-1]
    for after in (events[-1]["sequence_number"], 10_000):
        beyond = get(talker, response["id"], stream="true", starting_after=after)
        assert beyond.text == "data: [DONE]\n\n"


def test_in_the_background_with_a_stream(talker: Any) -> None:
    events = events_of(talker, say("slowly said", background=True))
    assert events[-1]["type"] == "response.completed"
    assert texts(events[-1]["response"]) == ["slowly said"]


def test_a_response_in_the_background_can_be_cancelled(talker: Any) -> None:
    response = talker.post(PATH, say("slow" * 200, background=True)).json()
    cancelled = httpx.post(f"{talker.url}{PATH}/{response['id']}/cancel", timeout=20).json()
    assert cancelled["status"] == "cancelled"
    assert get(talker, response["id"]).json() == cancelled
    again = httpx.post(f"{talker.url}{PATH}/{response['id']}/cancel", timeout=20).json()
    assert again == cancelled
    assert get(talker, response["id"], stream="true").status_code == 200


def test_another_response_can_not_be_cancelled(talker: Any) -> None:
    response = talker.post(PATH, say("A")).json()
    refused = httpx.post(f"{talker.url}{PATH}/{response['id']}/cancel", timeout=20)
    assert refused.status_code == 400
    assert get(talker, response["id"], stream="true").status_code == 400


def test_a_failure_in_the_background_is_kept(talker: Any) -> None:
    response = talker.post(PATH, say("slow crack", background=True)).json()
    failed = wait_done(talker, response["id"])
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"


def test_a_failure_in_a_stream_is_an_event(talker: Any) -> None:
    *_, last = events_of(talker, say("slow slow slow crack"))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(
    talker: Any, fields: dict[str, Any], param: str, stream: bool
) -> None:
    response = talker.post(PATH, say("x", stream=stream) | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": "say:x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "say:x"}], "max_tokens": 5}),
    ],
)
def test_h11_the_name_of_the_model_counts(talker: Any, path: str, body: dict[str, Any]) -> None:
    for model in ({}, {"model": None}, {"model": "bytes"}):
        response = talker.post(path, body | model)
        assert (response.status_code, response.json()["model"]) == (200, "bytes")
    for name, status in (("nope", 404), ("", 404), (5, 400)):
        response = talker.post(path, body | {"model": name})
        assert response.status_code == status
        assert "model" in response.json()["error"]["message"]


def test_input_tokens_are_counted(talker: Any) -> None:
    response = talker.post(f"{PATH}/input_tokens", say("Hello"))
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 5}


@pytest.fixture
def sdk(talker: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0)


def test_the_sdk_creates_and_retrieves(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model="bytes", input="say:Hello")
    assert response.output_text == "Hello"
    assert sdk.responses.retrieve(response.id).output_text == "Hello"
    items = list(sdk.responses.input_items.list(response.id, limit=1))
    assert len(items) == 1
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)


def test_the_sdk_streams(sdk: openai.OpenAI) -> None:
    text = f"<think>Hm.</think>I write.{WRITE}"
    with sdk.responses.stream(model="bytes", input=f"say:{text}", tools=TOOLS) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "I write."


def test_the_sdk_parses(sdk: openai.OpenAI) -> None:
    class City(pydantic.BaseModel):
        name: str

    # The grammar is the engine's business; here the model says what it would allow.
    response = sdk.responses.parse(model="bytes", input='say:{"name": "Paris"}', text_format=City)
    assert response.output_parsed == City(name="Paris")


def test_the_sdk_waits_and_cancels(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model="bytes", input="say:" + "slow" * 200, background=True)
    assert sdk.responses.cancel(response.id).status == "cancelled"
