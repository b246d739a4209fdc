"""Two hundred damaged files of each format, each refused by name (cases C07 and C11)."""

from __future__ import annotations

import json
import random
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUF_TYPES, read_gguf_header
from octavo_core.model_spec import read_model_spec
from octavo_worker.loading import WeightForm, load_weights
from support.gguf_writer import llama_metadata, write_gguf

CPU = torch.device("cpu")
NUM_MUTANTS = 200  # of each format


def _load(path, spec):
    load_weights(spec, path, WeightForm(torch.float32), CPU, lambda *_: None)


def _refused(path, spec, names):
    """Check that a file is refused quickly, with an error that names it or one of `names`."""
    started = time.thread_time()  # of this thread, however busy the machine is
    with pytest.raises(ModelError) as caught:
        _load(path, spec)
    assert time.thread_time() - started < 5
    message = str(caught.value)
    assert path.name in message or any(name in message for name in names), message


# safetensors


def _split(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(header, tensors):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def _cut(rng, data):
    return data[: rng.randrange(len(data))]


def _wrong_header_size(rng, data):
    length = int.from_bytes(data[:8], "little")
    wrong = rng.choice([0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1])
    return wrong.to_bytes(8, "little") + data[8:]


def _change_entry(rng, data, change):
    header, tensors = _split(data)
    name = rng.choice([name for name in sorted(header) if name != "__metadata__"])
    change(header[name])
    return _joined(header, tensors)


def _wrong_shape(rng, data):
    def change(entry):
        index = rng.randrange(len(entry["shape"]))
        entry["shape"][index] = rng.choice([0, 1, 2**31, 2**63, entry["shape"][index] + 1, -1])

    return _change_entry(rng, data, change)


def _wrong_offset(rng, data):
    def change(entry):
        index = rng.randrange(2)
        step = rng.choice([-8, -4, -1, 1, 4, 8, 2**31, 2**62])
        entry["data_offsets"][index] += step

    return _change_entry(rng, data, change)


def _wrong_type(rng, data):
    def change(entry):
        entry["dtype"] = rng.choice(["F16", "BF16", "F64", "I8", "BOOL", "U64", "F8_E4M3", "X", ""])

    return _change_entry(rng, data, change)


def _lost_entry(rng, data):
    header, tensors = _split(data)
    del header[rng.choice([name for name in sorted(header) if name != "__metadata__"])]
    return _joined(header, tensors)


def _not_a_number(rng, data):
    header, tensors = _split(data)
    offset = 4 * rng.randrange(len(tensors) // 4)
    value = rng.choice([float("nan"), float("inf"), float("-inf")])
    return _joined(header, tensors[:offset] + struct.pack("<f", value) + tensors[offset + 4 :])


SAFETENSORS_DAMAGE = [
    _cut,
    _wrong_header_size,
    _wrong_shape,
    _wrong_offset,
    _wrong_type,
    _lost_entry,
    _not_a_number,
]


def test_damaged_safetensors_are_refused_by_name(tiny_folder, tmp_path):
    spec = read_model_spec(tiny_folder)
    path = tmp_path / "model.safetensors"
    tensors = load_file(tiny_folder / "model.safetensors")
    save_file(tensors, path)
    whole = path.read_bytes()
    _load(tmp_path, spec)
    rng = random.Random(0)
    for index in range(NUM_MUTANTS):
        damage = SAFETENSORS_DAMAGE[index % len(SAFETENSORS_DAMAGE)]
        path.unlink()  # a new file each time: the old one may still be mapped
        path.write_bytes(damage(rng, whole))
        _refused(tmp_path, spec, [path.name, *tensors])


# GGUF


@pytest.fixture
def gguf_file(tmp_path):
    """A small Llama in float32 and Q8_0, as bytes of its file."""
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    tensors = {"token_embd.weight": ((100, 32), 0, bytes(100 * 32 * 4))}
    tensors["output_norm.weight"] = ((32,), 0, bytes(32 * 4))
    for layer in range(2):
        for name, (rows, columns) in shapes.items():
            content = bytes(rows * columns // 32 * 34)
            tensors[f"blk.{layer}.{name}.weight"] = ((rows, columns), 8, content)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = ((32,), 0, bytes(32 * 4))
    path = write_gguf(tmp_path / "model.gguf", llama_metadata(), tensors)
    return path, path.read_bytes(), tensors


def _entry(data, name):
    """Find where a tensor's entry has its dimensions; behind them are type and offset."""
    key = name.encode()
    return data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)


def _patched(data, offset, value, code):
    return data[:offset] + struct.pack("<" + code, value) + data[offset + struct.calcsize(code) :]


def _damaged_gguf(rng, data, tensors):
    """Damage one thing; return the file."""
    name = rng.choice(sorted(tensors))
    place = _entry(data, name)
    num_dimensions = struct.unpack_from("<I", data, place)[0]
    shape_place, type_place = place + 4, place + 4 + 8 * num_dimensions
    type_id = struct.unpack_from("<I", data, type_place)[0]
    kind = rng.randrange(7)
    if kind == 0:
        return data[: rng.randrange(len(data) - 256)]
    if kind == 1:  # counts of the header
        wrong = rng.choice([2**60, 2**63, len(data)])
        return _patched(data, 8 + 8 * rng.randrange(2), wrong, "Q")
    if kind == 2:
        place = shape_place + 8 * rng.randrange(num_dimensions)
        old = struct.unpack_from("<Q", data, place)[0]
        return _patched(data, place, rng.choice([0, old + 32, 2 * old, 2**32, 2**63]), "Q")
    if kind == 3:
        other = [number for number in GGUF_TYPES if number != type_id] + [99, 2**31]
        return _patched(data, type_place, rng.choice(other), "I")
    if kind == 4:
        return _patched(data, type_place + 4, rng.choice([1, 31, len(data), 2**63, 2**40]), "Q")
    if kind == 5:  # length of the name
        length_place = _entry(data, name) - len(name) - 8
        return _patched(data, length_place, rng.choice([0, 1, 2**31, 2**63]), "Q")
    return _patched(data, place, rng.choice([0, 5, 2**31]), "I")  # number of dimensions


def test_damaged_gguf_files_are_refused_by_name(gguf_file):
    path, whole, tensors = gguf_file
    spec = read_model_spec(path)
    _load(path, spec)
    rng = random.Random(0)
    for _ in range(NUM_MUTANTS):
        path.unlink()
        path.write_bytes(_damaged_gguf(rng, whole, tensors))
        _refused(path, spec, tensors)


def test_gguf_scales_that_are_not_numbers_are_refused(gguf_file):
    path, whole, _ = gguf_file
    info = read_gguf_header(path).tensors["blk.1.ffn_up.weight"]
    spec = read_model_spec(path)
    for value in (float("nan"), float("inf")):
        path.write_bytes(_patched(whole, info.offset + 34 * 5, value, "e"))
        with pytest.raises(ModelError, match=r"model.gguf: tensor blk.1.ffn_up.weight has numbers"):
            _load(path, spec)
