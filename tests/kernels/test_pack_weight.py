"""Packing loses nothing: what comes back is what gguf's own reader, or a formula, says."""

import gguf
import numpy as np
import pytest
import torch

from octavo_kernels import (
    PackedWeight,
    concatenate_weights,
    pack_awq_weight,
    pack_dense_weight,
    pack_fp8_weight,
    pack_gptq_weight,
    pack_weight,
    quantize_weight,
    unpack_weight,
)
from support.weights import GGUF_BLOCKS, gguf_weight, gptq_weight


@pytest.mark.parametrize("shape", [(1, 256), (8, 512), (43, 768), (4100, 256)], ids=str)
@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_gguf_weights_come_back_bit_for_bit(kind, shape):
    raw, expected = gguf_weight(kind, shape)
    packed = pack_weight(raw, kind.upper(), shape)
    assert torch.equal(unpack_weight(packed), expected)
    assert packed.shape == shape
    rows = -(-shape[0] // 8) * 8
    assert packed.num_bytes == raw.numel() // shape[0] * rows


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_any_bytes_unpack_like_the_reference(kind):
    block, block_bytes = GGUF_BLOCKS[kind]
    raw = np.random.default_rng(1).integers(0, 256, (16, 2, block_bytes), dtype=np.uint8)
    halves = [208] if kind == "q6_k" else [0, 2]
    for offset in halves:
        raw[..., offset + 1] &= 0b10111011  # what may be a float16 stays finite
    expected = gguf.dequantize(raw.reshape(16, -1), getattr(gguf.GGMLQuantizationType, _name(kind)))
    packed = pack_weight(torch.from_numpy(raw.ravel()), kind, (16, 2 * block))
    np.testing.assert_array_equal(unpack_weight(packed).numpy(), expected)


def _name(kind):
    return kind[:-1].upper() + kind[-1].upper()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (43, 70)], ids=str)
def test_dense_weights_come_back(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    assert torch.equal(unpack_weight(pack_dense_weight(weight)), weight.float())


@pytest.mark.parametrize("scales", [(), (1,), (140,), (140, 1), (2, 3)], ids=str)
def test_fp8_weights_come_back_with_their_scales(scales):
    weight = torch.randn(140, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(scales) + 0.5
    if scale.shape == (2, 3):
        wide = scale.repeat_interleave(128, 0)[:140].repeat_interleave(128, 1)[:, :300]
    else:
        wide = scale.reshape(-1, 1)
    packed = pack_fp8_weight(weight, scale)
    assert torch.equal(unpack_weight(packed), weight.float() * wide)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [32, 128])
def test_gptq_weights_come_back(group_size, act_order):
    qweight, qzeros, scales, index, expected = gptq_weight(256, 40, group_size, act_order)
    packed = pack_gptq_weight(qweight, qzeros, scales, index)
    assert (packed.input_order is not None) == act_order
    assert torch.equal(unpack_weight(packed), expected)


def test_awq_weights_come_back():
    # AWQ's words hold outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up.
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (256, 40), generator=generator)
    zeros = torch.randint(0, 16, (2, 40), generator=generator)
    scales = torch.rand(2, 40, generator=generator).half()

    def words(nibbles):
        columns = nibbles.view(len(nibbles), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        total = (columns << torch.arange(0, 32, 4)).sum(-1)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).int()

    packed = pack_awq_weight(words(values), words(zeros), scales)
    repeated = [x.float().repeat_interleave(128, 0) for x in (zeros, scales)]
    assert torch.equal(unpack_weight(packed), ((values - repeated[0]) * repeated[1]).t())


@pytest.mark.parametrize(("kind", "limit"), [("q8_0", 0.006), ("q4_0", 0.09), ("w8a8", 0.01)])
def test_quantizing_at_load_costs_what_it_may(kind, limit):
    weight = torch.randn(20, 512)
    weight[3] = 0
    restored = unpack_weight(quantize_weight(weight, kind))
    assert (restored - weight).norm() / weight.norm() < limit
    assert (restored[3] == 0).all()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantizing_chooses_the_references_numbers(kind):
    weight = torch.randn(16, 256)
    expected = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    restored = gguf.dequantize(expected, gguf.GGMLQuantizationType[kind.upper()])
    # The reference rounds halves away from zero, which random numbers hardly meet.
    np.testing.assert_array_equal(unpack_weight(quantize_weight(weight, kind)).numpy(), restored)


def test_weights_of_one_input_are_joined():
    parts = [quantize_weight(torch.randn(rows, 64), "q8_0") for rows in (16, 8, 5)]
    joined = concatenate_weights(parts)
    assert joined.shape == (29, 64)
    assert torch.equal(unpack_weight(joined), torch.cat([unpack_weight(part) for part in parts]))


def test_what_cannot_be_joined_is_refused():
    a, b = (quantize_weight(torch.randn(8, 64), kind) for kind in ("q8_0", "q4_0"))
    with pytest.raises(ValueError, match=r"q8_0 \(8, 64\) and q4_0 \(8, 64\) can't be joined"):
        concatenate_weights([a, b])
    with pytest.raises(ValueError, match=r"out_features is 5; .* multiple of 8"):
        concatenate_weights([quantize_weight(torch.randn(5, 64), "q8_0"), a])


def test_mistakes_are_named():
    raw = torch.zeros(34, dtype=torch.uint8)
    with pytest.raises(ValueError, match="34 bytes of q8_0 do not fill the shape"):
        pack_weight(raw, "q8_0", (2, 32))
    with pytest.raises(ValueError, match="in_features is 33; for q8_0 it must be a multiple of 32"):
        pack_weight(raw, "q8_0", (1, 33))
    with pytest.raises(ValueError, match="GGUF type 'iq2_s' can't be packed"):
        pack_weight(raw, "IQ2_S", (1, 32))
    with pytest.raises(ValueError, match=r"scales of an fp8 weight \[4, 4\] have the shape \[3\]"):
        pack_fp8_weight(torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(3))
    with pytest.raises(ValueError, match="can't be quantized to 'q4_k'; they can to q8_0, q4_0"):
        quantize_weight(torch.zeros(8, 256), "q4_k")
    qweight, qzeros, scales, _, _ = gptq_weight(64, 8, 16, False)
    with pytest.raises(ValueError, match="the group size must be a multiple of 32"):
        pack_gptq_weight(qweight, qzeros, scales)
    assert isinstance(pack_weight(raw, "q8_0", (1, 32)), PackedWeight)
