"""Weights in host memory (``--cpu-offload-gb``), and a device that copies when waited for."""

from __future__ import annotations

import pytest
import torch

from octavo_core.errors import ConfigError
from octavo_core.model_spec import read_model_spec
from octavo_worker.device import check_offload
from octavo_worker.layers.offloaded_weights import OffloadedWeights
from octavo_worker.load_model import Offload, load_model
from octavo_worker.loading import WeightForm
from octavo_worker.models import resolve_model_class
from octavo_worker.offload_plan import NUM_STAGED, OffloadPlan, plan_offload
from octavo_worker.worker import Worker
from support.one_prompt import prompt_logits
from support.tiny_families import VOCAB_SIZE, save_family

CPU = torch.device("cpu")
FORM = WeightForm(torch.float32)
NOT_A_NUMBER = 0xFF  # a float of such bytes is none


class LateCopies:
    """A device on which a copy is made no earlier than it is waited for.

    What is in a buffer at any other time is no number, so that layers which compute too early or
    too late can't be right.
    """

    def __init__(self):
        self.pending = {}
        self.log = []

    def host_buffer(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def staging_buffer(self, num_bytes):
        return torch.full((num_bytes,), NOT_A_NUMBER, dtype=torch.uint8)

    def start(self, number, host, staging):
        assert number not in self.pending, "a buffer is written twice"
        staging.fill_(NOT_A_NUMBER)
        self.pending[number] = host, staging
        self.log.append(("start", number))

    def wait(self, number):
        if number in self.pending:  # else it is there already
            host, staging = self.pending.pop(number)
            staging.copy_(host)
        self.log.append(("wait", number))

    def release(self, number):
        assert number not in self.pending
        self.log.append(("release", number))


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "gpt-oss", "gpt2", "opt"])
def test_the_logits_are_those_of_weights_on_the_device(family, tmp_path):
    layers = {"n_layer": 5} if family == "gpt2" else {"num_hidden_layers": 5}
    save_family(family, tmp_path, **layers, **({"layer_types": None} if "gemma" in family else {}))
    spec = read_model_spec(tmp_path)
    token_ids = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    copies = LateCopies()
    offload = Offload(1 << 30, copies)
    plain, offloaded = (
        load_model(spec, tmp_path, FORM, 64, CPU, lambda *_: None, offload=wanted).model
        for wanted in (None, offload)
    )
    expected = prompt_logits(plain, spec, token_ids)
    for _ in range(2):  # the second time the first layers are there already
        copies.log.clear()
        assert torch.equal(prompt_logits(offloaded, spec, token_ids), expected)
    # Five layers take turns with two buffers, and each copy began before its turn.
    starts = [entry for entry in copies.log if entry[0] == "start"]
    assert len(starts) == 5
    assert copies.log[0] == ("wait", 0)
    assert copies.log.index(("wait", 1)) == 3  # after layer 0 was released, and 2 begun


def test_a_step_that_fails_midway_leaves_the_next_one_right(tmp_path):
    save_family("llama", tmp_path, num_hidden_layers=4)
    spec = read_model_spec(tmp_path)
    offload = Offload(1 << 30, _Forgiving())
    model = load_model(spec, tmp_path, FORM, 64, CPU, lambda *_: None, offload=offload).model
    token_ids = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    expected = prompt_logits(model, spec, token_ids)
    layer = model._layers[2]
    forward = layer.forward
    layer.forward = None  # can't be called
    with pytest.raises(TypeError):
        prompt_logits(model, spec, token_ids)
    layer.forward = forward
    assert torch.equal(prompt_logits(model, spec, token_ids), expected)


class _Forgiving(LateCopies):
    """Takes copies that follow each other, as a stream does."""

    def start(self, number, host, staging):
        self.pending.pop(number, None)
        super().start(number, host, staging)


def test_a_budget_is_spent_on_layers_far_apart(tmp_path):
    save_family("llama", tmp_path, num_hidden_layers=8)
    spec = read_model_spec(tmp_path)
    layout = _layout(spec)
    whole = plan_offload(layout, torch.float32, 1 << 30)
    assert list(whole.layers) == list(range(8))
    layer = whole.num_bytes // 8
    assert whole.staged_bytes == NUM_STAGED * layer
    half = plan_offload(layout, torch.float32, 4 * layer + 1)
    assert list(half.layers) == [0, 2, 4, 6]
    assert half.num_bytes == 4 * layer
    assert all(name.startswith("model.layers.2.") for name in half.layers[2])
    assert len(plan_offload(layout, torch.bfloat16, 4 * layer + 4096).layers) == 8


def test_a_budget_that_frees_nothing_is_refused(tmp_path):
    save_family("llama", tmp_path, num_hidden_layers=8)
    layout = _layout(read_model_spec(tmp_path))
    layer = plan_offload(layout, torch.float32, 1 << 30).num_bytes // 8
    with pytest.raises(ConfigError, match=r"at least 3 layers, .* GiB") as caught:
        plan_offload(layout, torch.float32, 2 * layer)
    assert caught.value.field == "cpu_offload_gb"
    save_family("llama", tmp_path)
    with pytest.raises(ConfigError, match="only 2 layers"):
        plan_offload(_layout(read_model_spec(tmp_path)), torch.float32, 1 << 30)


def _layout(spec):
    return resolve_model_class(spec).weight_layout(spec)


def test_layers_of_several_sizes_share_the_buffers():
    names = {index: (f"layers.{index}.a", f"layers.{index}.b") for index in range(3)}
    weights = {}
    for index, layer in names.items():
        for name in layer:
            weights[name] = torch.full((7 + 100 * index,), float(index), dtype=torch.bfloat16)
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    plan = OffloadPlan(names, 4096, 2 * 1024, 3)
    offloaded = OffloadedWeights(weights, plan, LateCopies())
    for index in (0, 1, 2, 0, 1, 2):
        offloaded.before(index)
        for name in names[index]:
            assert torch.equal(offloaded[name], expected[name])
        offloaded.after(index)
    assert offloaded["layers.0.a"].isnan().all()  # it is being fetched


def test_a_cpu_refuses_it_by_name(make_config, tiny_folder):
    config = make_config(tiny_folder, cpu_offload_gb=2)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb is 2 .* in host memory anyway"):
        Worker(config, read_model_spec(tiny_folder)).init_device()
    with pytest.raises(ConfigError, match="runs through transformers"):
        check_offload(config, torch.device("cuda"), has_layers=False)
    check_offload(config, torch.device("cuda"), has_layers=True)
    check_offload(make_config(tiny_folder), CPU, has_layers=False)
