"""What clients get over HTTP: the same texts, however many ask at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading

import openai
import pytest

from octavo_server import LLM, SamplingParams
from support.prompts import PROMPTS
from support.server import Server

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def stream_text(client: openai.OpenAI, model: str, prompt: str, seed: int | None) -> str:
    stream = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0 if seed is None else 0.9,
        seed=seed,
        stream=True,
    )
    return "".join(chunk.choices[0].text for chunk in stream)


def test_32_streams_at_once_get_the_texts_they_get_alone(client: openai.OpenAI, model: str) -> None:
    jobs = [(PROMPTS[i % len(PROMPTS)], None if i % 2 else i) for i in range(32)]
    alone = [stream_text(client, model, *job) for job in jobs]
    together = [""] * len(jobs)

    def run(index: int) -> None:
        together[index] = stream_text(client, model, *jobs[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert all(alone)


def test_chat_streams_what_it_answers(client: openai.OpenAI, model: str) -> None:
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_completion_tokens": 30,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_async_client(server: Server, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=10,
            temperature=0,
            stream=True,
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Say hello."}],
            max_tokens=10,
            temperature=0,
        )
    assert text == whole.choices[0].message.content


def test_errors_reach_the_sdk_as_its_own_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="no-such-model", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=model, prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_printed_curl_line_works(server: Server) -> None:
    start = server.log.index("curl ")
    command = (
        server.log[start : server.log.index("\n\n", start)]
        if "\\\n" in server.log[start:]
        else server.log[start:].splitlines()[0]
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    # The first thing that a user sees of a model is a right answer.
    assert "H2O" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_offline_and_served_answers_are_one(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "What is the sea?"}]
    served = client.chat.completions.create(
        model=model, messages=messages, max_tokens=20, temperature=0
    )
    llm = LLM()
    try:
        (result,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    finally:
        llm.shutdown()
    assert result.outputs[0].text == served.choices[0].message.content
