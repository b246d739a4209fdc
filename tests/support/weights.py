"""Weights in the layouts of files, with the float32 numbers that they stand for."""

import gguf
import numpy as np
import torch

# Weights and bytes of a block.
GGUF_BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}


def gguf_weight(kind, shape, seed=0):
    """Make the bytes of a GGUF tensor, and what gguf's own reader makes of them."""
    generator = np.random.default_rng(seed)
    kind_number = gguf.GGMLQuantizationType[kind.upper()]
    if kind.endswith("k"):
        # The gguf package does not quantize to these, so the bytes are random.
        block, block_bytes = GGUF_BLOCKS[kind]
        raw = generator.integers(0, 256, (shape[0], shape[1] // block, block_bytes), np.uint8)
        halves = generator.uniform(1e-4, 1e-3, (*raw.shape[:2], 2)).astype(np.float16)
        if kind == "q6_k":
            raw[..., 208:] = halves[..., :1].view(np.uint8)
        else:
            raw[..., :4] = halves.view(np.uint8)
        raw = raw.reshape(shape[0], -1)
    else:
        raw = gguf.quantize(generator.standard_normal(shape, np.float32), kind_number)
    expected = torch.from_numpy(gguf.dequantize(raw, kind_number).copy())
    return torch.from_numpy(np.array(raw, np.uint8).ravel()), expected


def gptq_weight(inputs, outputs, group_size, act_order, seed=0):
    """Make a weight in GPTQ's layout.

    Returns:
        qweight, qzeros, scales, group_index, and ``[outputs, inputs]`` float32.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // group_size
    values = torch.randint(0, 16, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, 16, (groups, outputs), generator=generator)
    scales = (torch.rand(groups, outputs, generator=generator) / 16).half()
    index = torch.arange(inputs) // group_size
    if act_order:
        index = index[torch.randperm(inputs, generator=generator)]
    shifts = torch.arange(0, 32, 4)

    def words(nibbles):
        total = (nibbles << shifts).sum(-1)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).int()

    qweight = words(values.view(-1, 8, outputs).transpose(1, 2))
    qzeros = words((zeros - 1).view(groups, -1, 8))
    expected = ((values - zeros[index]).float() * scales[index].float()).t().contiguous()
    return qweight, qzeros, scales, index.int(), expected
