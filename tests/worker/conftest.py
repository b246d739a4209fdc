"""Small models that transformers makes, and the starter model if it is at hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo_core.config import EngineConfig, resolve_config
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import NewRequestData, SchedulerOutput


def tiny_llama(**changes) -> LlamaForCausalLM:
    """Make a Llama of two layers with random weights, large enough to tell logits apart."""
    values = {
        "vocab_size": 300,
        "hidden_size": 60,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # zeros and ones would hide a mix-up
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def engine_config(model_path: Path, **values) -> EngineConfig:
    """Make a configuration for a small CPU engine."""
    defaults = {
        "device": "cpu",
        "cpu_threads": 2,
        "max_num_seqs": 8,
        "kv_cache_memory": 1 << 24,
        "heartbeat_timeout": 60,  # the machine may be busy
    }
    return resolve_config(defaults | values).replace("the test", model_path=str(model_path))


GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def new_request(slot, token_ids, block_ids, params=GREEDY, *, computed=0, num_prompt_tokens=None):
    """Make the data of a request that enters a slot."""
    return NewRequestData(
        slot=slot,
        request_id=f"request-{slot}",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling_params=params,
        block_tables=[block_ids],
        num_computed_tokens=computed,
    )


def step(scheduled, *, new=(), blocks=(), freed=(), step_id=1):
    """Make a step from (slot, number of tokens, number computed before) triples."""
    return SchedulerOutput(
        step_id=step_id,
        freed_slots=list(freed),
        new_requests=list(new),
        new_block_ids=[(slot, [block_ids]) for slot, block_ids in blocks],
        slots=[slot for slot, _, _ in scheduled],
        num_scheduled_tokens=[count for _, count, _ in scheduled],
        num_computed_tokens=[computed for _, _, computed in scheduled],
    )


def generate(executor, token_ids, num_tokens, params=GREEDY, *, slot=0, block_ids=range(20)):
    """Generate with one request alone; returns the new tokens."""
    request = new_request(slot, token_ids, list(block_ids), params)
    scheduled, new, tokens = (slot, len(token_ids), 0), [request], []
    for index in range(num_tokens):
        executor.execute_model(step([scheduled], new=new, step_id=index + 1))
        tokens += executor.sample_tokens(None).result(timeout=60).sampled_token_ids
        scheduled, new = (slot, 1, len(token_ids) + index), []
    executor.execute_model(step([], freed=[slot]))
    assert executor.sample_tokens(None).result(timeout=60).sampled_token_ids == []
    return tokens


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's file, fetched once by the server package."""
    reason = "octavo-server, which fetches the starter model, is not installed"
    return pytest.importorskip("octavo_server.starter_model", reason=reason).starter_gguf()


@pytest.fixture(autouse=True)
def _fixed_torch() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def drive() -> SimpleNamespace:
    """Functions to drive a model runner or an executor by hand, as a scheduler would."""
    return SimpleNamespace(new_request=new_request, step=step, generate=generate, greedy=GREEDY)


@pytest.fixture(scope="session")
def make_llama():
    return tiny_llama


@pytest.fixture(scope="session")
def make_config():
    return engine_config
