"""Structured output of the starter model, through the official SDK."""

from __future__ import annotations

import enum
import json
import re
import threading
import time
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from octavo_server import LLM, SamplingParams, StructuredOutputsParams
from support.json_schemas import all_schemas
from support.server import Server

BOMBS: list[dict[str, Any]] = [
    {"json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},
    {"json": {"type": "integer", "multipleOf": 99_999_989}},
    {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    {"regex": r"(a|b)*a(a|b){60}" * 20},
    {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    {
        "grammar": "start: r0\n"
        + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60))
        + 'r60: "x"'
    },
    {"grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
    {"json": {"enum": [f"value {i}" for i in range(4000)]}},
    {
        "json": {
            "allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(5)]} for i in range(9)]
        }
    },
]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


class Mood(enum.Enum):
    good = "good"
    bad = "bad"


class Address(BaseModel):
    street: str = Field(max_length=20)
    zip: str = Field(pattern=r"^\d{5}$")


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


class Employee(Person):
    address: Address
    skills: list[Literal["python", "rust", "go"]] = Field(max_length=3)


class Verdict(BaseModel):
    mood: Mood
    confidence: float = Field(ge=0, le=1)


class Optional(BaseModel):
    text: str | None
    number: int | float


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: int


class Square(BaseModel):
    kind: Literal["square"]
    side: int


class Shapes(BaseModel):
    shapes: list[Circle | Square] = Field(min_length=1, max_length=2)


class Step(BaseModel):
    explanation: str = Field(max_length=30)
    output: str = Field(max_length=10)


class Solution(BaseModel):
    steps: list[Step] = Field(max_length=2)
    answer: int


class Flags(BaseModel):
    a: bool
    b: bool
    c: bool


class Nothing(BaseModel):
    pass


class Words(BaseModel):
    pair: tuple[int, int]


class Big(BaseModel):
    population: int = Field(ge=0, le=20_000_000_000)


class Tree(BaseModel):
    value: int
    child: Leaf | None


class Leaf(BaseModel):
    value: int


MODELS: list[type[BaseModel]] = [
    *(Person, Employee, Verdict, Optional, Shapes, Solution, Flags, Nothing, Words, Big),
    *(Tree, Address),
]


@pytest.mark.parametrize("wanted", MODELS)
def test_parse(client: openai.OpenAI, model: str, wanted: type[BaseModel]) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": f"Make up a {wanted.__name__}, as JSON."}],
        response_format=wanted,
        temperature=0.8,
        seed=1,
        max_tokens=300,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, wanted)


def test_parse_of_a_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": "Who wrote Faust?"}],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    ) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_an_answer_is_the_same_alone_and_in_a_crowd(client: openai.OpenAI, model: str) -> None:
    names = ["person", "invoice", "sentiment", "geo_point", "color", "tree", "moderation", "quiz"]
    schemas = all_schemas()

    def ask(name: str) -> str:
        stream = client.completions.create(
            model=model,
            prompt=f"A {name}: ",
            max_tokens=60,
            temperature=0.7,
            seed=5,
            stream=True,
            extra_body={"structured_outputs": {"json": schemas[name]}},
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    alone = {name: ask(name) for name in names}
    together: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda name=name: together.update({name: ask(name)}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_an_answer_to_an_empty_schema_is_json_if_it_ends(client: openai.OpenAI, model: str) -> None:
    """G05"""
    for prompt in ("any", "1, 2, 3, 4, 5,", "Pi is 3.1415926535897932384626433832795028841971"):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            response_format={"type": "json_schema", "json_schema": {"name": "any", "schema": {}}},
            max_tokens=64,
            temperature=0,
        )
        (choice,) = answer.choices
        text = choice.message.content or ""
        assert not re.search(r"\d{40}", text)
        if choice.finish_reason == "stop":
            json.loads(text)


def test_bombs_are_refused_or_harmless(client: openai.OpenAI, model: str, server: Server) -> None:
    """X07 and G03: grammar bombs and nested regexes, while a neighbour's stream goes on."""
    gaps: list[float] = []
    refusals: list[str] = []
    stop = threading.Event()

    def neighbour() -> None:
        while not stop.is_set():
            stream = client.completions.create(
                model=model,
                prompt="Once",
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            last = None
            for _ in stream:
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now

    def send(bomb: dict[str, Any]) -> float:
        start = time.perf_counter()
        try:
            client.completions.create(
                model=model, prompt="x", max_tokens=3, extra_body={"structured_outputs": bomb}
            )
        except openai.BadRequestError as error:
            refusals.append(str(error))
        return time.perf_counter() - start

    thread = threading.Thread(target=neighbour)
    assert send({"choice": ["yes", "no"]}) >= 0  # from here on both processes are up
    thread.start()
    time.sleep(2)
    undisturbed = max(gaps)
    gaps.clear()
    try:
        seconds = [send(bomb) for bomb in BOMBS]
    finally:
        stop.set()
        thread.join()
    print(f"longest: bomb {max(seconds):.2f} s, gap {max(gaps):.3f} s, before {undisturbed:.3f} s")
    assert len(refusals) >= 4
    assert all("structured_outputs" in text or "JSON schema" in text for text in refusals)
    # A time of its own in a test says more of the machine than of the code; hence the factors.
    assert max(seconds) < 5 * max(1, undisturbed / 0.1)
    assert max(gaps) < max(0.5, 5 * undisturbed)
    assert send({"choice": ["yes", "no"]}) < 5
    assert server.process.poll() is None


def test_llm() -> None:
    schema = all_schemas()["person"]
    with LLM(max_model_len=512, kv_cache_memory=1 << 28) as llm:
        params = SamplingParams(
            temperature=0,
            max_tokens=60,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
        )
        free = SamplingParams(temperature=0, max_tokens=10)
        one, two = llm.generate(["A person: ", "Once upon"], [params, free], use_tqdm=False)
        jsonschema.validate(json.loads(one.outputs[0].text), schema)
        assert one.outputs[0].finish_reason == "stop"
        assert len(two.outputs[0].token_ids) == 10
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="["))
        with pytest.raises(ValueError, match="regex"):
            llm.generate(["x", "y"], [free, bad], use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
