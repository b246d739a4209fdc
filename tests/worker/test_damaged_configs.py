"""Damaged configurations and indices: each is refused by name, and none crashes (case C07)."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_core.errors import UserError
from octavo_core.model_spec import read_model_spec
from octavo_worker.layers.rotary import build_rotaries
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.tiny_families import save_family

CPU = torch.device("cpu")
WRONG = (None, True, -1, 0, 1.5, 2**31, 2**63, 2**70, 1e300, "", "x", "64", [], [1], {}, {"a": 1})
NUM_MUTANTS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    save_family("qwen3-moe", folder, mlp_only_layers=[])
    return folder


def _load(folder):
    """Go as far as a start does."""
    spec = read_model_spec(folder)
    resolve_model_class(spec)
    load_weights(spec, folder, WeightForm(torch.float32), CPU, lambda *_: None)
    build_rotaries(spec, 64, CPU)


def _outcome(folder):
    try:
        _load(folder)
    except UserError as error:
        return error
    return None


def test_wrong_entries_of_config_are_refused_or_harmless(folder, tmp_path):
    """Each entry with each wrong value; what is accepted loads the weights as they are."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    rng = random.Random(0)
    places = [(key, value) for key in sorted(config) for value in WRONG]
    refused = 0
    needed = {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim"}
    must = [(key, value) for key in sorted(needed) for value in (-1, 0, 1.5, 2**31, 2**63, "x", [])]
    must.append(("num_experts", 2**31))
    for key, value in [*must, *rng.sample(places, NUM_MUTANTS)]:
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        error = _outcome(tmp_path)
        refused += error is not None
        if (key, value) in must and value != config.get(key):
            assert error is not None, f"{key} = {value!r} was taken"
    assert refused > NUM_MUTANTS // 3


@pytest.mark.parametrize("rope", [*WRONG[1:], {"rope_type": "yarn"}, {"rope_type": ["x"]}])
def test_wrong_ropes_are_refused_or_harmless(folder, tmp_path, rope):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for name in ("rope_scaling", "rope_parameters"):
        config.pop("rope_parameters", None)
        (tmp_path / "config.json").write_text(json.dumps({**config, name: rope}))
        _outcome(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", '{"a": NaN}', '{"architectures": ' + "[" * 5000, "\0", "{}"],
)
def test_what_is_no_configuration_is_refused_by_name(folder, tmp_path, text):
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    error = _outcome(tmp_path)
    assert error is not None
    assert "config.json" in str(error)


# The index of shards


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory):
    """The same weights in two shards, and their index."""
    target = tmp_path_factory.mktemp("shards")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        shard = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, target / shard)
        weight_map |= dict.fromkeys(part, shard)
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target, {"metadata": {}, "weight_map": weight_map}


def _damaged_index(rng, index):
    weight_map = dict(index["weight_map"])
    name = rng.choice(sorted(weight_map))
    kind = rng.randrange(6)
    if kind == 0:
        del weight_map[name]
    elif kind == 1:
        weight_map[name] = rng.choice([None, 1, True, [], {}, "", ".", "..", "a\0b"])
    elif kind == 2:
        weight_map[name] = rng.choice(["../model-0.safetensors", "/etc/passwd", "no.safetensors"])
    elif kind == 3:  # the other shard
        weight_map[name] = f"model-{1 - int(weight_map[name][6])}.safetensors"
    elif kind == 4:
        weight_map[f"{name}x"] = weight_map.pop(name)
    else:
        return {"weight_map": rng.choice([None, [], {}, 1, "x", [name]])}
    return {**index, "weight_map": weight_map}


def test_damaged_indices_are_refused_by_name(shards):
    folder, index = shards
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert _outcome(folder) is None
    rng = random.Random(0)
    for _ in range(40):
        path.write_text(json.dumps(_damaged_index(rng, index)))
        error = _outcome(folder)
        assert error is not None, path.read_text()[:300]
        assert "safetensors" in str(error) or error.field in index["weight_map"]
    for text in ("", "[]", "{", "\xff"):
        path.write_text(text, encoding="latin-1")
        assert "index.json" in str(_outcome(folder))
