"""Pooling models through the whole engine, against transformers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers

from octavo_core.errors import ConfigError, ModelError
from octavo_core.pooling_params import PoolingParams
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_worker.layers.pooling import combine, condense, pool
from support.pooled import (
    pool_all,
    pooling_engine,
    pooling_request,
    run,
    to_array,
    write_modules,
)
from support.tiny_families import FAMILIES, make_model

TEXTS = [[2, 17, 5, 99, 3], [2, 3], [2, *range(20, 60), 3], [4, 8, 9, 2, 11], [7]]
TOLERANCE = 1e-4
ENCODER = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    # Its number must not be among the tokens: transformers hides padding.
    "pad_token_id": 1,
}


def _encoder(family: str, head: str, **changes):
    """An encoder of transformers' with random weights, biases and norms."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**ENCODER, **changes})
    model = getattr(transformers, family + head)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.inference_mode()
def _logits(model, text, **inputs):
    return model(input_ids=torch.tensor([text]), **inputs).logits[0]


@torch.inference_mode()
def _hidden(model, text):
    return model(input_ids=torch.tensor([text])).last_hidden_state[0]


def _assert_close(found, expected):
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=TOLERANCE)


RAW = PoolingParams("classify", use_activation=False)


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize(
    ("family", "types"),
    [("Bert", 2), ("Roberta", 1), ("XLMRoberta", 1)],
)
def test_heads_of_encoders(family, types, quantization, tmp_path):
    model = _encoder(family, "ForSequenceClassification", type_vocab_size=types, num_labels=3)
    model.save_pretrained(tmp_path)
    with pooling_engine(tmp_path, quantization=quantization) as engine:
        for text, found in zip(TEXTS, pool_all(engine, TEXTS, RAW), strict=True):
            _assert_close(found, _logits(model, text))


def test_a_pair_has_two_kinds_of_tokens(tmp_path):
    model = _encoder("Bert", "ForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path)
    pair, second = TEXTS[2], 20
    types = torch.tensor([[0] * second + [1] * (len(pair) - second)])
    requests = [
        pooling_request("pair", pair, PoolingParams("classify", second_segment=second)),
        pooling_request("one", pair, PoolingParams("classify")),
    ]
    with pooling_engine(tmp_path) as engine:
        outputs = run(engine, requests)
    # One class alone is a matter of yes or no.
    expected = torch.sigmoid(_logits(model, pair, token_type_ids=types))
    _assert_close(to_array(outputs["pair"].pooled), expected)
    _assert_close(to_array(outputs["one"].pooled), torch.sigmoid(_logits(model, pair)))
    assert abs(to_array(outputs["pair"].pooled) - to_array(outputs["one"].pooled)) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral window"])
def test_heads_of_decoders(family, tmp_path):
    """The score of the last token, with prompts in pieces and over cached prefixes."""
    made = FAMILIES[family]
    base = make_model(made)
    config = type(base.config)(**{**base.config.to_dict(), "num_labels": 3, "pad_token_id": 1})
    torch.manual_seed(1)
    name = f"{made.name}ForSequenceClassification"
    model = getattr(transformers, name)(config).eval()
    model.model.load_state_dict(base.model.state_dict())
    model.save_pretrained(tmp_path)
    settings = {"quantization": "none", "kv_cache_dtype": "float32", "block_size": 4}
    with pooling_engine(tmp_path, max_num_batched_tokens=16, **settings) as engine:
        for _ in range(2):
            for text, found in zip(TEXTS, pool_all(engine, TEXTS, RAW), strict=True):
                _assert_close(found, _logits(model, text))
        assert engine.scheduler.blocks.num_prefix_hits
        assert engine.scheduler.blocks.pool.num_used == 0


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token", "lasttoken"])
def test_embeddings_of_a_decoder(mode, tmp_path):
    """In pieces and in whole, cold and over a cache that has the text already."""
    model = make_model(FAMILIES["qwen3"]).model
    model.save_pretrained(tmp_path)
    write_modules(tmp_path, mode)
    pick = {
        "mean_tokens": lambda hidden: hidden.mean(0),
        "cls_token": lambda hidden: hidden[0],
        "lasttoken": lambda hidden: hidden[-1],
    }[mode]
    expected = [torch.nn.functional.normalize(pick(_hidden(model, text)), dim=-1) for text in TEXTS]
    settings = {"quantization": "none", "kv_cache_dtype": "float32", "block_size": 4}
    params = PoolingParams(needs_all_tokens=mode != "lasttoken")
    for budget in (8, 512):
        with pooling_engine(tmp_path, max_num_batched_tokens=budget, **settings) as engine:
            for _ in range(2):
                for found, wanted in zip(pool_all(engine, TEXTS, params), expected, strict=True):
                    _assert_close(found, wanted)
            assert bool(engine.scheduler.blocks.num_prefix_hits) is (mode == "lasttoken")


def test_one_vector_a_token(tmp_path):
    model = make_model(FAMILIES["llama"]).model
    model.save_pretrained(tmp_path)
    params = PoolingParams("token_embed", use_activation=False, needs_all_tokens=True)
    settings = {"quantization": "none", "kv_cache_dtype": "float32"}
    with pooling_engine(tmp_path, max_num_batched_tokens=16, **settings) as engine:
        for text, found in zip(TEXTS, pool_all(engine, TEXTS, params), strict=True):
            assert found.shape == (len(text), 60)
            _assert_close(found, _hidden(model, text))


def test_preempted_texts_are_pooled_all_the_same(tmp_path):
    model = make_model(FAMILIES["llama"]).model
    model.save_pretrained(tmp_path)
    write_modules(tmp_path, "mean_tokens")
    generator = np.random.default_rng(0)
    texts = [generator.integers(2, 131, 60).tolist() for _ in range(6)]
    params = PoolingParams(needs_all_tokens=True)
    settings = {"kv_cache_dtype": "float32", "block_size": 4, "max_num_batched_tokens": 24}
    with pooling_engine(
        tmp_path, num_gpu_blocks_override=34, max_model_len=64, **settings
    ) as engine:
        together = pool_all(engine, texts, params)
        for text, found in zip(texts, together, strict=True):
            (alone,) = pool_all(engine, [text], params)
            np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
        assert engine.scheduler.blocks.pool.num_used == 0


def test_dimensions_are_cut_before_vectors_are_brought_to_length_one(tmp_path):
    model = _encoder("Bert", "Model")
    model.save_pretrained(tmp_path)
    with pooling_engine(tmp_path) as engine:
        (raw,) = pool_all(engine, TEXTS[:1], PoolingParams(use_activation=False))
        (cut,) = pool_all(engine, TEXTS[:1], PoolingParams(dimensions=16))
    np.testing.assert_allclose(cut, raw[:16] / np.linalg.norm(raw[:16]), rtol=0, atol=1e-6)


def test_an_encoder_takes_a_text_of_its_whole_context(tmp_path):
    """RoBERTa's positions begin behind the padding's number: its table has two rows more."""
    model = _encoder("Roberta", "Model", type_vocab_size=1)
    model.save_pretrained(tmp_path)
    text = [2] * 62
    params = PoolingParams("token_embed", use_activation=False)
    # The budget of a step is what holds the longest text, whatever was asked for.
    with pooling_engine(tmp_path, max_num_batched_tokens=16) as engine:
        found, short = pool_all(engine, [text, [5, 6]], params)
        outputs = run(engine, [pooling_request("long", [*text, 3], params)])
    _assert_close(found, _hidden(model, text))
    _assert_close(short, _hidden(model, [5, 6]))
    assert outputs["long"].error_kind == "ContextLengthError"
    assert "63 tokens" in outputs["long"].error


def test_a_request_for_another_kind_of_model_is_refused(tmp_path):
    _encoder("Bert", "Model").save_pretrained(tmp_path)
    with pooling_engine(tmp_path) as engine:
        wrong = [
            EngineCoreRequest("text", [2, 3], SamplingParams(max_tokens=2)),
            pooling_request("classes", [2, 3], PoolingParams("classify")),
        ]
        outputs = run(engine, wrong)
        assert {output.error_kind for output in outputs.values()} == {"InvalidRequestError"}
        assert len(pool_all(engine, TEXTS)) == len(TEXTS)


def test_a_text_that_breaks_its_step_fails_alone(tmp_path, monkeypatch):
    """The others of its batch get the vectors that they would have had."""
    _encoder("Bert", "Model").save_pretrained(tmp_path)
    poison = [66, 66, 66]
    with pooling_engine(tmp_path) as engine:
        expected = pool_all(engine, TEXTS)
        encoder = engine._executor._running.runner._encoder
        forward = encoder.forward

        def break_on_poison(input_ids, *arguments):
            if 66 in input_ids.tolist():
                raise RuntimeError("poison")
            return forward(input_ids, *arguments)

        monkeypatch.setattr(encoder, "forward", break_on_poison)
        texts = [*TEXTS[:2], poison, *TEXTS[2:]]
        requests = [
            pooling_request(str(number), text, PoolingParams()) for number, text in enumerate(texts)
        ]
        outputs = run(engine, requests)
    assert outputs["2"].error_kind == "RequestFailedError"
    found = [to_array(outputs[name].pooled) for name in "01345"]
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-6)


def test_aborted_and_late_texts_leave_nothing_behind(tmp_path):
    make_model(FAMILIES["llama"]).model.save_pretrained(tmp_path)
    with pooling_engine(tmp_path, max_num_batched_tokens=8, block_size=4) as engine:
        engine.add_request(pooling_request("gone", TEXTS[2], PoolingParams()))
        engine.add_request(pooling_request("late", TEXTS[2], PoolingParams(), deadline=1.0))
        engine.step()
        engine.abort_requests(["gone"])
        outputs = run(engine, [pooling_request("there", TEXTS[0], PoolingParams())])
        assert outputs["there"].finish_reason == "stop"
        assert "gone" not in outputs
        assert engine.scheduler.blocks.pool.num_used == 0


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_text_in_pieces_is_pooled_as_the_whole(pooling):
    hidden = torch.randn(9, 4)
    pieces = [condense(hidden[a:b], pooling) for a, b in itertools.pairwise((0, 2, 3, 9))]
    whole = pool(hidden, [9], pooling, normalize=False)
    torch.testing.assert_close(combine(pieces, pooling, 9), whole)


def test_what_is_not_computed_is_refused_by_name(tmp_path):
    _encoder("Bert", "Model").save_pretrained(tmp_path)
    write_modules(tmp_path, "max_tokens")
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"), pooling_engine(tmp_path):
        pass
    refused = pytest.raises(ConfigError, match="BertModel has no language-model head")
    with refused, pooling_engine(tmp_path, runner="generate"):
        pass


def test_the_flags_count_more_than_the_files(tmp_path):
    model = make_model(FAMILIES["llama"])
    model.save_pretrained(tmp_path)
    settings = {"quantization": "none", "kv_cache_dtype": "float32"}
    with pooling_engine(tmp_path, runner="pooling", pooling_type="mean", **settings) as engine:
        params = PoolingParams(use_activation=False, needs_all_tokens=True)
        (found,) = pool_all(engine, TEXTS[:1], params)
    _assert_close(found, _hidden(model.model, TEXTS[0]).mean(0))
