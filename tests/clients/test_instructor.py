"""`instructor`: pydantic objects out of answers, and another try where they are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")

GOOD, BAD = {"name": "Ada", "age": 36}, {"name": "Ada", "age": -1}
MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA]


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int = Field(ge=0)


def client(url: str, mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_object(script: str, mode: Any) -> None:
    messages = [{"role": "user", "content": json.dumps(GOOD)}]
    answer = client(script, mode).chat.completions.create(
        model="script", messages=messages, response_model=Person, max_retries=0
    )
    assert (answer.name, answer.age) == ("Ada", 36)
    assert answer._raw_response.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_wrong_object_is_asked_for_again(script: str, mode: Any) -> None:
    """The second turn has the first answer and what was wrong with it."""
    messages = [{"role": "user", "content": f"{json.dumps(BAD)}|||{json.dumps(GOOD)}"}]
    answer = client(script, mode).chat.completions.create(
        model="script", messages=messages, response_model=Person, max_retries=2
    )
    assert answer.age == 36


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_parts_of_an_object_stream(script: str, mode: Any) -> None:
    messages = [{"role": "user", "content": json.dumps(GOOD)}]
    parts = list(
        client(script, mode).chat.completions.create_partial(
            model="script", messages=messages, response_model=Person
        )
    )
    # How many there are depends on who is quicker.
    assert (parts[-1].name, parts[-1].age) == ("Ada", 36)


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=str)
def test_a_real_model(starter: str, mode: Any) -> None:
    """A small model, which is held to the schema: it can't be wrong about the form.

    In the mode JSON only the form of JSON is asked for.
    """
    answer = client(starter, mode).chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": "Ada is 36 years old. Who is it?"}],
        response_model=Person,
        max_retries=0,
        temperature=0,
        max_tokens=100,
    )
    assert answer.name
