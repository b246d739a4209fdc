"""Dense mixtures of experts: how their weights lie, and that nothing in them waits for a GPU."""

from __future__ import annotations

import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_kernels import stacked_moe
from octavo_worker.load_model import load_model
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.one_prompt import prompt_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU, META = torch.device("cpu"), torch.device("meta")
DENSE = WeightForm(torch.float32)

pytestmark = pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])


@pytest.fixture
def spec(family, tmp_path):
    save_family(family, tmp_path)
    return read_model_spec(tmp_path)


@pytest.fixture
def calls(family, monkeypatch):
    """The arguments of every call of `stacked_moe`."""
    module = "models.gpt_oss" if family == "gpt-oss" else "layers.moe"
    recorded = []

    def record(*arguments, **options):
        recorded.append(arguments)
        hidden = arguments[0]
        return torch.empty_like(hidden) if hidden.is_meta else stacked_moe(*arguments, **options)

    monkeypatch.setattr(f"octavo_worker.{module}.stacked_moe", record)
    return recorded


def test_a_layer_is_one_call_over_weights_that_are_there_once(spec, calls, tmp_path, monkeypatch):
    weights = load_weights(spec, tmp_path, DENSE, CPU, lambda *_: None)
    model = resolve_model_class(spec)(spec, weights, 64, CPU)
    token_ids = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    logits = prompt_logits(model, spec, token_ids)
    assert len(calls) == len(spec.moe_layers)
    names = {weight.data_ptr(): name for name, weight in weights.items()}
    for _, *stacks, _, _, _ in calls:
        for stack, projection in zip(stacks, ("gate_up_proj", "down_proj"), strict=True):
            assert stack.is_contiguous()
            found = [names[matrix.data_ptr()] for matrix in stack]
            assert [name.split(".")[-3:] for name in found] == [
                [str(index), projection, "weight"] for index in range(spec.num_experts)
            ]
    # The same, expert by expert.
    monkeypatch.setattr("octavo_worker.layers.moe._stack_of", lambda linears: None)
    calls.clear()
    one_by_one = resolve_model_class(spec)(spec, weights, 64, CPU)
    assert torch.equal(prompt_logits(one_by_one, spec, token_ids), logits)
    assert not calls


def test_the_choice_of_experts_does_not_wait_for_the_device(spec, calls, tmp_path):
    """Tensors without numbers raise where the host would ask for one."""
    weights = {
        name: weight.to(META)
        for name, weight in load_weights(spec, tmp_path, DENSE, CPU, lambda *_: None).items()
    }
    model = resolve_model_class(spec)(spec, weights, 64, META)
    hidden = torch.empty(7, spec.hidden_size, device=META)
    mixture = model._layers[spec.moe_layers[0]]._mlp
    assert mixture.forward(hidden).shape == hidden.shape
    (call,) = calls
    assert call[4].shape == (7, spec.num_experts_per_tok)


def test_packed_weights_are_not_stacked(spec, calls, tmp_path):
    form = WeightForm(torch.float32, "auto")
    model = load_model(spec, tmp_path, form, 64, CPU, lambda *_: None).model
    assert prompt_logits(model, spec, [1, 2, 3]).isfinite().all()
    assert not calls
