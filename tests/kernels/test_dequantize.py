"""Unpacking against the reference implementation of the gguf package."""

import gguf
import numpy as np
import pytest
import torch

from octavo_kernels import DEQUANTIZABLE_TYPES, dequantize
from support.weights import gguf_weight

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1")
SIMPLE = tuple(name for name in DEQUANTIZABLE_TYPES if not name.endswith("K"))


def _packed(type_name, shape):
    weights = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType[type_name])
    return torch.from_numpy(np.frombuffer(packed.tobytes(), np.uint8).copy()), packed


@pytest.mark.parametrize("shape", [(256,), (3, 512)], ids=str)
@pytest.mark.parametrize("type_name", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks_equal_the_reference_bit_for_bit(type_name, shape):
    raw, expected = gguf_weight(type_name.lower(), (1, 256) if len(shape) == 1 else shape)
    result = dequantize(raw, type_name, shape)
    assert torch.equal(result, expected.view(shape))
    with pytest.raises(ValueError, match=f"bytes of {type_name} do not fill"):
        dequantize(raw[:-1], type_name, shape)


@pytest.mark.parametrize("shape", [(32,), (1, 64), (3, 32), (5, 96), (2, 3, 32)], ids=str)
@pytest.mark.parametrize("type_name", SIMPLE)
def test_equals_the_reference_bit_for_bit(type_name, shape):
    data, packed = _packed(type_name, shape)
    expected = gguf.dequantize(packed, gguf.GGMLQuantizationType[type_name])
    result = dequantize(data, type_name, shape)
    assert result.dtype == torch.float32
    assert np.array_equal(result.numpy(), expected)


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_any_bytes_unpack_like_the_reference(type_name):
    generator = np.random.default_rng(1)
    block_bytes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[type_name]
    blocks = generator.integers(0, 256, (50, block_bytes), dtype=np.uint8)
    blocks[:, [1, 3]] &= 0b10111011  # scale and minimum stay finite
    expected = gguf.dequantize(blocks.reshape(5, -1), gguf.GGMLQuantizationType[type_name])
    result = dequantize(torch.from_numpy(blocks.ravel()), type_name, (5, 320))
    assert np.array_equal(result.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("type_name", SIMPLE)
def test_out_is_filled(type_name, dtype):
    data, _ = _packed(type_name, (4, 32))
    out = torch.full((6, 32), 9.0, dtype=dtype)
    dequantize(data, type_name, (4, 32), out[1:5])
    assert torch.equal(out[1:5], dequantize(data, type_name, (4, 32)).to(dtype))
    assert (out[[0, 5]] == 9).all()


def test_unknown_types_are_refused_by_name():
    with pytest.raises(ValueError, match=r"IQ4_XS is not supported.*Q4_1"):
        dequantize(torch.zeros(136, dtype=torch.uint8), "IQ4_XS", (256,))


@pytest.mark.parametrize("num_bytes", [0, 19, 20, 60])
def test_bytes_that_do_not_fill_the_shape_are_refused(num_bytes):
    with pytest.raises(ValueError, match=rf"{num_bytes} bytes of Q4_1 do not fill"):
        dequantize(torch.zeros(num_bytes, dtype=torch.uint8), "Q4_1", (2, 32))
