"""The routes of pooling models, over HTTP, with an engine whose vectors are known."""

from __future__ import annotations

import base64
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo_server.api.pooling_answers import (
    ClassificationAnswer,
    EmbeddingAnswer,
    PoolingAnswer,
    RerankAnswer,
    ScoreAnswer,
)
from support.front import FrontUnderTest
from support.scripted_pooling import CLASSIFIER, CROSS_ENCODER, EMBEDDER, normalized, vector_of

GENERATION_PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
POOLING_PATHS = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}


def _served(tmp_path_factory: pytest.TempPathFactory, model: dict[str, Any]) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pooling")
    running = FrontUnderTest(
        folder, "run_pooling", model=model, max_num_queued_reqs=64, max_num_seqs=4
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    model = {**EMBEDDER, "is_matryoshka": True, "matryoshka_dimensions": [2, 4]}
    yield from _served(tmp_path_factory, model)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    yield from _served(tmp_path_factory, CLASSIFIER)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    yield from _served(tmp_path_factory, CROSS_ENCODER)


def _ids(front: FrontUnderTest, text: str) -> list[int]:
    tokens: list[int] = front.post("/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


def _count(front: FrontUnderTest, name: str, label: str = "") -> float:
    text = httpx.get(f"{front.url}/metrics", verify=False).text
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)


def _embeddings(front: FrontUnderTest, **body: Any) -> list[Any]:
    response = front.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


def test_the_openai_sdk_gets_the_numbers(embedder: FrontUnderTest) -> None:
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="-")
    for extra in ({}, {"encoding_format": "float"}):
        made = client.embeddings.create(model="bytes", input=["abba", "hd"], **extra)
        assert [item.index for item in made.data] == [0, 1]
        for item, text in zip(made.data, ("abba", "hd"), strict=True):
            assert item.embedding == pytest.approx(normalized(vector_of(text)), abs=1e-6)
        assert made.usage.prompt_tokens == made.usage.total_tokens == 6
        assert made.model == "bytes"


def test_h13_every_form_of_input_gives_the_same_vectors(embedder: FrontUnderTest) -> None:
    texts = ["face", "bad egg"]
    expected = _embeddings(embedder, input=texts)
    ids = [_ids(embedder, text) for text in texts]
    assert _embeddings(embedder, input=ids) == expected
    assert _embeddings(embedder, input=texts[0]) == expected[:1]
    assert _embeddings(embedder, input=ids[0]) == expected[:1]


@pytest.mark.parametrize(
    "wrong",
    [[], [""], "", ["a", 1], [[1, "a"]], [[]], [-1], [[-1]], [10**9], [2**63], [1.5], [True], None],
)
def test_h13_s07_other_input_is_refused_by_name(embedder: FrontUnderTest, wrong: Any) -> None:
    response = embedder.post("/v1/embeddings", {"input": wrong})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("input")


def test_h13_a_long_text_is_refused_and_not_cut(embedder: FrontUnderTest) -> None:
    error = embedder.post("/v1/embeddings", {"input": "a" * 513}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "513 tokens" in error["message"]
    assert "at most 512" in error["message"]
    assert len(_embeddings(embedder, input="a" * 512)) == 1
    (cut,) = _embeddings(embedder, input="a" * 600 + "b" * 600, truncate_prompt_tokens=-1)
    assert cut == pytest.approx(normalized(vector_of("a")))
    (left,) = _embeddings(embedder, input="aabb", truncate_prompt_tokens=2, truncation_side="left")
    assert left == pytest.approx(normalized(vector_of("b")))


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input[0]"),
        ("/pooling", {"input": ["a", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": [[1], [999]]}, "input[1]"),
        ("/v1/embeddings", {"input": [[999]]}, "input[0]"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"text_1": [""], "text_2": ["a", "b"]}, "text_1[0]"),
        ("/score", {"queries": "a", "items": [""]}, "items[0]"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": [""]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["a", {"text": "b" * 999}]}, "documents[1]"),
    ],
)
def test_a_wrong_text_is_named_as_the_body_has_it(
    embedder: FrontUnderTest, cross_encoder: FrontUnderTest, path: str, body: Any, name: str
) -> None:
    for front in (embedder, cross_encoder):
        if front is embedder or path in ("/score", "/rerank"):
            error = front.post(path, body).json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(name)


def test_h11_another_models_name_is_a_404(embedder: FrontUnderTest) -> None:
    response = embedder.post("/v1/embeddings", {"input": "a", "model": "nope"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_dimensions_are_those_that_the_model_states(embedder: FrontUnderTest) -> None:
    (cut,) = _embeddings(embedder, input="abcd", dimensions=2)
    assert cut == pytest.approx(normalized([1.0, 1.0]))
    error = embedder.post("/v1/embeddings", {"input": "a", "dimensions": 3}).json()["error"]
    assert error["message"] == "dimensions is 3; the model supports 2, 4."


def test_base64_is_little_endian_float32(embedder: FrontUnderTest) -> None:
    (text,) = _embeddings(embedder, input="abba", encoding_format="base64", normalize=False)
    assert struct.unpack("<8f", base64.b64decode(text)) == tuple(vector_of("abba"))


def test_pooling_gives_a_vector_for_each_token_or_for_the_text(embedder: FrontUnderTest) -> None:
    def data(**body: Any) -> Any:
        return embedder.post("/pooling", {"input": "abc", **body}).json()["data"][0]["data"]

    assert data() == data(task="token_embed") == [[0, 0], [1, 1], [2, 2]]
    assert data(task="embed") == pytest.approx(normalized(vector_of("abc")))
    assert len(base64.b64decode(data(encoding_format="base64"))) == 3 * 2 * 4
    refused = embedder.post("/pooling", {"input": "abc", "task": "classify"})
    assert refused.status_code == 400
    assert "'embed' or 'token_embed'" in refused.json()["error"]["message"]


def test_score_by_the_angle_of_embeddings(embedder: FrontUnderTest) -> None:
    def scores(**body: Any) -> list[float]:
        answer = embedder.post("/score", body).json()
        return [item["score"] for item in answer["data"]]

    assert scores(text_1="aa", text_2=["a", "b", "ab"]) == pytest.approx([1, 0, 0.5**0.5])
    assert scores(queries=["a", "b"], documents=["a", "a"]) == pytest.approx([1, 0])
    assert scores(data_1="a", data_2="a") == pytest.approx([1])
    wrong = embedder.post("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert wrong.status_code == 400
    assert "N and N" in wrong.json()["error"]["message"]
    assert embedder.post("/score", {"text_1": "a"}).status_code == 400


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents(embedder: FrontUnderTest, path: str) -> None:
    body = {"query": "a", "documents": ["b", "ab", {"text": "aa"}], "model": "bytes"}
    answer = embedder.post(path, body).json()
    assert [item["index"] for item in answer["results"]] == [2, 1, 0]
    assert answer["results"][0]["document"] == {"text": "aa"}
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == pytest.approx([1, 0.5**0.5, 0])
    assert answer["usage"]["total_tokens"] == 6
    first = embedder.post(path, {**body, "top_n": 1, "return_documents": False}).json()
    assert first["results"] == [{"index": 2, "relevance_score": pytest.approx(1)}]
    # Of "ab" one token is left.
    cut = embedder.post(path, {**body, "max_tokens_per_doc": 1}).json()["results"]
    assert [item["relevance_score"] for item in cut] == pytest.approx([1, 1, 0])


def test_classes_have_the_models_names(classifier: FrontUnderTest) -> None:
    answer = classifier.post("/classify", {"input": ["abb", "h"]}).json()
    assert [item["label"] for item in answer["data"]] == ["b", "h"]
    assert answer["data"][0]["probs"] == vector_of("abb")
    assert answer["data"][0]["num_classes"] == 8
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_cross_encoder_scores_pairs(cross_encoder: FrontUnderTest) -> None:
    answer = cross_encoder.post("/score", {"text_1": "b", "text_2": ["a", "ab"]})
    scores = [item["score"] for item in answer.json()["data"]]
    assert scores == pytest.approx([1 / 2, 1 / 3])
    assert answer.json()["usage"]["prompt_tokens"] == 5
    ranked = cross_encoder.post("/rerank", {"query": "b", "documents": ["b", "aa", "a"]}).json()
    assert [item["index"] for item in ranked["results"]] == [1, 2, 0]
    assert cross_encoder.post("/classify", {"input": "a"}).json()["data"][0]["label"] == "fits"


def test_each_kind_of_model_refuses_what_the_others_answer(
    embedder: FrontUnderTest,
    classifier: FrontUnderTest,
    cross_encoder: FrontUnderTest,
    front: FrontUnderTest,
) -> None:
    def refused(server: FrontUnderTest) -> set[str]:
        found = set()
        for path, body in {**GENERATION_PATHS, **POOLING_PATHS}.items():
            response = server.post(path, body)
            if response.status_code == 400:
                assert "The model does not support " in response.json()["error"]["message"]
                found.add(path)
        return found

    generation, scoring = (
        set(GENERATION_PATHS),
        {p for p in POOLING_PATHS if "r" in p} - {"/v1/embeddings"},
    )
    assert refused(front) == set(POOLING_PATHS)
    assert refused(embedder) == generation | {"/classify"}
    assert refused(classifier) == generation | scoring | {"/v1/embeddings"}
    assert refused(cross_encoder) == generation | {"/v1/embeddings"}


def test_a_text_that_breaks_the_step_fails_alone(embedder: FrontUnderTest) -> None:
    results: dict[str, httpx.Response] = {}

    def post(text: str) -> None:
        results[text] = embedder.post("/v1/embeddings", {"input": text})

    texts = ["slow a", "slow b", "break c", "d", "nan", "slow e"]
    threads = [threading.Thread(target=post, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = {text: response.status_code for text, response in results.items()}
    assert codes == {text: 500 if text in ("break c", "nan") else 200 for text in texts}
    (vector,) = _embeddings(embedder, input="d")
    assert vector == pytest.approx(normalized(vector_of("d")))


def test_a_crash_is_survived_and_its_culprit_fails(embedder: FrontUnderTest) -> None:
    results: dict[str, int] = {}

    def post(text: str) -> None:
        results[text] = embedder.post("/v1/embeddings", {"input": text}).status_code

    texts = ["slow a", "slow b", "slow c", "slow f", "die"]
    threads = [threading.Thread(target=post, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {text: 500 if text == "die" else 200 for text in texts}
    while httpx.get(f"{embedder.url}/health", verify=False).status_code == 503:
        time.sleep(0.05)
    assert len(_embeddings(embedder, input=["a", "b"])) == 2


def test_deadlines_and_the_line(embedder: FrontUnderTest) -> None:
    late = embedder.post("/v1/embeddings", {"input": ["slow"] * 20, "timeout": 0.1})
    assert late.status_code == 504
    assert "before its text was pooled" in late.json()["error"]["message"]
    many = embedder.post("/v1/embeddings", {"input": ["a"] * 65})
    assert many.status_code == 400
    assert "--max-num-queued-reqs" in many.json()["error"]["message"]
    assert len(_embeddings(embedder, input=["a"] * 64)) == 64


def test_a_client_that_leaves_takes_its_texts_along(embedder: FrontUnderTest) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{embedder.url}/v1/embeddings",
            json={"input": ["slow"] * 60},
            timeout=httpx.Timeout(20, read=0.5),
            verify=False,
        )
    while not _count(embedder, "request_success_total", "abort"):
        time.sleep(0.05)
    assert len(_embeddings(embedder, input=["a"] * 64)) == 64


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/embeddings", EmbeddingAnswer),
        ("/pooling", PoolingAnswer),
        ("/score", ScoreAnswer),
        ("/rerank", RerankAnswer),
    ],
)
def test_answers_have_the_shape_that_is_told(
    embedder: FrontUnderTest, path: str, answer: Any
) -> None:
    answer.model_validate(embedder.post(path, POOLING_PATHS[path]).json(), strict=True)


def test_metrics_count_the_texts(classifier: FrontUnderTest) -> None:
    def count(name: str) -> float:
        return _count(classifier, name)

    before = count("prompt_tokens_total"), count("request_success_total")
    answer = classifier.post("/classify", {"input": ["abc", "de"]}).json()
    ClassificationAnswer.model_validate(answer, strict=True)
    assert count("prompt_tokens_total") == before[0] + 5
    assert count("request_success_total") == before[1] + 2
    assert count("num_requests_running") == 0
    assert count("generation_tokens_total") == 0
