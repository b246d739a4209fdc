"""Penalties, biases, bad words and allowed tokens on the starter model, against transformers.

As in `test_greedy_parity`: the reference is asked once for each answer, its own logits
processors are applied at each position, and each of our tokens has to be the likeliest then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from octavo_server import LLM, SamplingParams
from octavo_server.input_processor import spell_bad_words
from octavo_server.request_output import RequestOutput
from octavo_server.tokenizer import Tokenizer
from support.server import Server
from support.starter_reference import starter_reference

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 8
VOCAB = 49152
PROMPT = "The capital of France is"
WORDS = ["Paris", "the", "The answer", " located"]
ALLOWED = tuple(range(0, VOCAB, 3))

RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    "bias": {"logit_bias": {7042: -100.0, 5732: -6.0, 900: 1.5}},
    "bad words": {"bad_words": WORDS},
    "allowed": {"allowed_token_ids": ALLOWED},
    "all": {
        "allowed_token_ids": ALLOWED,
        "bad_words": WORDS,
        "logit_bias": {900: 3.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
    },
}


class OnlyAllowed:
    """As transformers' `SuppressTokensLogitsProcessor` of all others, which takes a second."""

    def __init__(self, allowed: tuple[int, ...]) -> None:
        self._forbidden = torch.ones(VOCAB, dtype=torch.bool)
        self._forbidden[list(allowed)] = False

    def __call__(self, seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(self._forbidden, -torch.inf)


class OutputPenalties:
    """Transformers has neither: the formula of OpenAI's page, over the answer alone."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._presence, self._frequency = presence, frequency

    def __call__(self, seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(seen[0, self._num_prompt_tokens :], minlength=VOCAB)
        return scores - self._frequency * counts - self._presence * (counts > 0)


def processors_for(
    rules: dict[str, Any], tokenizer: Tokenizer, num_prompt_tokens: int
) -> LogitsProcessorList:
    """Transformers' processors for our parameters, in the order in which we apply them."""
    made = LogitsProcessorList()
    if "allowed_token_ids" in rules:
        made.append(OnlyAllowed(rules["allowed_token_ids"]))
    if "bad_words" in rules:
        spelt = spell_bad_words(rules["bad_words"], tokenizer)
        made.append(NoBadWordsLogitsProcessor([list(ids) for ids in spelt]))
    if "logit_bias" in rules:
        bias = [[[token_id], value] for token_id, value in rules["logit_bias"].items()]
        made.append(SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in rules:
        made.append(RepetitionPenaltyLogitsProcessor(rules["repetition_penalty"]))
    presence, frequency = rules.get("presence_penalty", 0.0), rules.get("frequency_penalty", 0.0)
    made.append(OutputPenalties(num_prompt_tokens, presence, frequency))
    return made


@pytest.fixture(scope="module")
def exact(starter_path: Path) -> Iterator[LLM]:
    with LLM(str(starter_path), max_model_len=128, quantization="none") as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(exact: LLM) -> dict[str, RequestOutput]:
    """The prompt under each of the rules, all in one batch."""
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **rules)
        for rules in RULES.values()
    ]
    results = exact.generate([PROMPT] * len(params), params, use_tqdm=False)
    return dict(zip(RULES, results, strict=True))


@pytest.fixture(scope="module")
def reference_logits(starter_path: Path) -> Callable[[list[int]], torch.Tensor]:
    reference = starter_reference(starter_path)

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
        return logits

    return compute


@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_transformers(
    exact: LLM, answers: dict[str, RequestOutput], reference_logits: Any, name: str
) -> None:
    """Case S09: repetition counts the prompt from the first token on, presence does not."""
    prompt_ids, output = answers[name].prompt_token_ids, answers[name].outputs[0]
    assert len(output.token_ids) == NUM_TOKENS
    processors = processors_for(RULES[name], exact.tokenizer, len(prompt_ids))
    logits = reference_logits(prompt_ids + output.token_ids[:-1])
    for index, token_id in enumerate(output.token_ids):
        seen = torch.tensor([prompt_ids + output.token_ids[:index]])
        row = logits[len(prompt_ids) + index - 1].unsqueeze(0).clone()
        assert int(processors(seen, row)[0].argmax()) == token_id, index
    if name != "none":  # else the rule had nothing to do
        assert output.text != answers["none"].outputs[0].text
    if "bad_words" in RULES[name]:
        assert not any(f" {word.strip()} " in f"{output.text} " for word in WORDS)


def test_seeded_answers_do_not_depend_on_the_batch(starter_path: Path) -> None:
    """Case S03: a seeded request was not reproducible beside one without a seed."""
    rules: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "logit_bias": {28: 2.0}},
        {"frequency_penalty": 0.8, "presence_penalty": -0.3, "bad_words": ["a", " the"]},
        {"allowed_token_ids": ALLOWED, "min_tokens": 9, "top_k": 40},
        {"top_p": 0.9, "min_p": 0.02, "min_tokens": 20, "repetition_penalty": 0.9},
    ]
    seeded = [
        SamplingParams(temperature=0.9, seed=42 + index, max_tokens=24, **rule)
        for index, rule in enumerate(rules)
    ]
    noise = [SamplingParams(temperature=1.2, max_tokens=30, **rule) for rule in rules]
    mixed = [params for triple in zip(noise, seeded, noise, strict=True) for params in triple]
    prompt = "The best thing about"
    # The one-call decoder of packed weights: quick enough for answers one after the other.
    with LLM(str(starter_path), max_model_len=128, num_gpu_blocks_override=20) as llm:
        alone = [llm.generate(prompt, one, use_tqdm=False)[0].outputs[0] for one in seeded]
        assert llm.engine.scheduler.num_preemptions == 0
        together = llm.generate([prompt] * len(mixed), mixed, use_tqdm=False)[1::3]
        assert llm.engine.scheduler.num_preemptions > 0
    assert [one.token_ids for one in alone] == [result.outputs[0].token_ids for result in together]


def test_prompt_logprobs(exact: LLM, reference_logits: Any) -> None:
    """Case T15: log-probabilities of a prompt are those of one forward pass."""
    prompt = "\n1. Carol has 20 apples and gives 5 of them to her friend. " * 2
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    exact.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # it is cached now
    (result,) = exact.generate(prompt, params, use_tqdm=False)
    assert result.prompt_logprobs is not None
    first, *rest = result.prompt_logprobs
    assert first is None
    expected = reference_logits(result.prompt_token_ids).log_softmax(-1)
    following = result.prompt_token_ids[1:]
    for row, token_id, position in zip(expected, following, rest, strict=False):
        assert position is not None
        assert position.chosen.token_id == token_id
        assert position.chosen.logprob == pytest.approx(float(row[token_id]), abs=2e-3)
        assert position.rank == int((row > row[token_id]).sum()) + 1
        assert [top.token_id for top in position.top] == row.topk(3).indices.tolist()
    assert len(rest) == len(following)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 5, "top_k": 1},
        {"logprobs": 20, "allowed_token_ids": [28]},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"logprob_token_ids": [28, 30], "return_tokens_as_token_ids": True},
        {"prompt_logprobs": 20, "temperature": 0.01, "bad_words": ["battery"]},
    ],
)
def test_no_value_is_more_than_json_can_say(server: Server, fields: dict[str, Any]) -> None:
    """Case S17: minus infinity could not be written, and the answer was a 500."""
    body = {"prompt": "correct horse battery staple", "temperature": 1, "max_tokens": 4, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    choice = json.loads(response.text, parse_constant=refuse)["choices"][0]
    if "logprob_token_ids" in fields:
        for top, token in zip(
            choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"], strict=True
        ):
            assert set(top) == {"token_id:28", "token_id:30", token}
    if "allowed_token_ids" in fields:
        assert len({*choice["logprobs"]["tokens"]}) == 1
    if fields.get("echo"):
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        pairs = zip(choice["logprobs"]["tokens"], offsets, strict=True)
        assert all(text.startswith(token, offset) for token, offset in pairs)
