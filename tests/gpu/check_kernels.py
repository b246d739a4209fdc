"""Compare the Triton kernels with the torch twins on a GPU.

    PYTHONPATH=packages/kernels/src python tests/gpu/check_kernels.py

Needs torch, triton, numpy and a CUDA or ROCm device, and none of the other packages. It takes a
minute or two, most of it compiling, and ends with status 1 if anything differs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from octavo_kernels import AttentionMetadata, SamplingMetadata
from octavo_kernels import triton as kernels
from octavo_kernels.apply_bitmask import apply_bitmask_reference
from octavo_kernels.apply_penalties import apply_penalties_reference
from octavo_kernels.compute_logprobs import compute_logprobs_reference
from octavo_kernels.kv_quantization import dequantize_kv, quantize_kv
from octavo_kernels.mla_decode import mla_decode_reference
from octavo_kernels.pack_weight import pack_fp8_weight
from octavo_kernels.paged_attention import AttentionOptions, paged_attention_reference
from octavo_kernels.quantize_weight import quantize_weight
from octavo_kernels.rotary_embedding import rotary_embedding_reference
from octavo_kernels.sample import sample_reference
from octavo_kernels.silu_and_mul import silu_and_mul_reference
from octavo_kernels.stacked_moe import stacked_moe_reference
from octavo_kernels.unpack_weight import unpack_weight
from octavo_kernels.write_kv_cache import write_kv_cache_reference

DEVICE = torch.device("cuda")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Both round to bfloat16 once; the softmax's weights are rounded as well.
CLOSE = 1.6e-2

Check = Callable[[], float]


def main(deadline: float = float("inf")) -> int:
    """Run all checks; what has not begun by `deadline` (of `time.monotonic`) counts as bad."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    bad = 0
    for name, limit, check in checks():
        if time.monotonic() > deadline:
            print(f"BAD {name}: there was no time left for it")
            bad += 1
            continue
        torch.manual_seed(0)
        begun = time.monotonic()
        try:
            difference = check()
            good = difference <= limit
            text = f"differs by {difference:.2e} (limit {limit:.0e})"
        except Exception as error:
            good, text = False, f"{type(error).__name__}: {error}"[:300]
        bad += not good
        print(f"{'ok ' if good else 'BAD'} {name}: {text}, {time.monotonic() - begun:.1f} s")
    print(f"{bad} bad")
    return bad > 0


def checks() -> Iterator[tuple[str, float, Check]]:
    """Yield the name, the limit and the function of each check."""
    mixed = [(1, 700), (300, 300), (7, 2000), (1, 1), (129, 130)]
    decode = [(1, length) for length in (1, 15, 16, 17, 4000)]
    for name, lens in (("mixed", mixed), ("decode", decode)):
        for heads in ((9, 3), (32, 8), (8, 1), (12, 12)):
            for dim in (64, 80, 128, 256):
                yield f"attention {name} {heads} {dim}", CLOSE, attention(lens, heads, dim)
        for kind in (E4M3, torch.float8_e5m2, torch.int8):
            check = attention(lens, (32, 8), 128, kind=kind)
            yield f"attention {name} {kind}", CLOSE, check
        yield f"attention {name} window", CLOSE, attention(lens, (8, 4), 64, window=100)
        yield f"attention {name} cap", CLOSE, attention(lens, (8, 4), 64, soft_cap=20.0)
        yield f"attention {name} sinks", CLOSE, attention(lens, (8, 4), 64, has_sinks=True)
        yield f"latent attention {name}", CLOSE, latent_attention(lens)
    yield "batch-invariant attention", 0.0, invariant_attention
    for kind in (BF16, E4M3, torch.float8_e5m2, torch.int8):
        yield f"write {kind}", 0.0, cache_write(kind)
    yield "rotary", CLOSE, rotary(False)
    yield "rotary interleaved", CLOSE, rotary(True)
    yield "norms", CLOSE, norms
    yield "activations", CLOSE, activations
    for kind in ("q8_0", "q4_0", "e4m3"):
        for num_tokens in (1, 33, 500):
            yield f"{kind} {num_tokens} tokens", CLOSE, product(kind, num_tokens)
    yield "w8a8", 1e-4, scaled_product
    # Rounded to bfloat16 between the two products as well.
    yield "experts", 5e-2, experts
    # Logarithms differ in the last digit, so one of some hundred tokens may.
    yield "sample (share of rows)", 0.02, sampling
    yield "logprobs", 1e-4, logprobs
    yield "penalties and bitmask", 1e-5, masks


def worst(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the larger of 1 and the magnitude."""
    result, expected = result.double(), expected.double()
    if not torch.equal(result.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    difference = (result - expected)[finite].abs() / expected[finite].abs().clamp(min=1)
    return difference.max().item() if difference.numel() else 0.0


def make_batch(
    lens: list[tuple[int, int]], num_kv_heads: int, dim: int, block_size: int = 16
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Build key and value caches for (query length, sequence length) pairs."""
    blocks_of = [-(-seq_len // block_size) for _, seq_len in lens]
    shuffled = torch.randperm(sum(blocks_of) + 1).tolist()
    tables = torch.zeros(len(lens), max(blocks_of), dtype=torch.int32)
    for row, count in enumerate(blocks_of):
        tables[row, :count] = torch.tensor([shuffled.pop() for _ in range(count)])
    starts = torch.tensor([0, *(query_len for query_len, _ in lens)]).cumsum(0).int()
    seq_lens = [seq_len for _, seq_len in lens]
    metadata = AttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int32, device=DEVICE),
        host_query_start_loc=starts.tolist(),
        host_seq_lens=seq_lens,
        block_size=block_size,
    )
    shape = (sum(blocks_of) + 1, num_kv_heads, block_size, dim)
    keys, values = (torch.randn(shape, device=DEVICE).to(BF16) for _ in range(2))
    return keys, values, metadata


def attention(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    kind: torch.dtype | None = None,
    has_sinks: bool = False,
    **options: object,
) -> Check:
    def check() -> float:
        keys, values, metadata = make_batch(lens, heads[1], dim)
        query = torch.randn(metadata.host_query_start_loc[-1], heads[0], dim, device=DEVICE)
        scales: dict[str, Tensor | None] = {}
        if kind is not None:
            (keys, key_scale), (values, value_scale) = (
                quantize_kv(cache, kind, True) for cache in (keys, values)
            )
            scales = {"key_scale": key_scale, "value_scale": value_scale}
        scale = dim**-0.5
        if has_sinks:
            options["sinks"] = torch.randn(heads[0], device=DEVICE)
        result = kernels.paged_attention(
            query.to(BF16), keys, values, metadata, scale, **options, **scales
        )
        wide = [
            dequantize_kv(cache, scales.get(name))
            for cache, name in ((keys, "key_scale"), (values, "value_scale"))
        ]
        expected = paged_attention_reference(
            query.to(BF16).float(), *wide, metadata, AttentionOptions(scale, **options)
        )
        return worst(result, expected)

    return check


def latent_attention(lens: list[tuple[int, int]]) -> Check:
    def check() -> float:
        keys, _, metadata = make_batch(lens, 1, 576)
        query = torch.randn(metadata.host_query_start_loc[-1], 40, 576, device=DEVICE).to(BF16)
        result = kernels.mla_decode(query, keys[:, 0], metadata, 0.05, 512)
        latents = keys[:, 0].float()
        return worst(result, mla_decode_reference(query.float(), latents, metadata, 0.05, 512))

    return check


def invariant_attention() -> float:
    """A token alone against the same token at the end of its prompt."""
    keys, values, prompt = make_batch([(500, 500)], 8, 128)
    query = torch.randn(500, 32, 128, device=DEVICE).to(BF16)
    whole = kernels.paged_attention(query, keys, values, prompt, 0.1, batch_invariant=True)
    last = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        seq_lens=prompt.seq_lens,
        block_tables=prompt.block_tables,
        slot_mapping=prompt.slot_mapping[:1],
        host_query_start_loc=[0, 1],
        host_seq_lens=[500],
        block_size=prompt.block_size,
    )
    alone = kernels.paged_attention(query[-1:], keys, values, last, 0.1, batch_invariant=True)
    return worst(alone, whole[-1:])


def cache_write(kind: torch.dtype) -> Check:
    def check() -> float:
        key, value = torch.randn(2, 50, 8, 128, device=DEVICE).to(BF16)
        slots = torch.randperm(160, device=DEVICE)[:50].int()
        slots[3] = -1
        results = []
        for write in (kernels.write_kv_cache, write_kv_cache_reference):
            caches = [torch.zeros(10, 8, 16, 128, device=DEVICE).to(kind) for _ in range(2)]
            scales = [torch.zeros(10, 8, 16, device=DEVICE) for _ in range(2)]
            given = {}
            if kind.itemsize == 1:
                given = {"key_scale": scales[0], "value_scale": scales[1]}
            write(key, value, *caches, slots, **given)
            results.append([*(cache.float() for cache in caches), *scales])
        return max(worst(one, other) for one, other in zip(*results, strict=True))

    return check


def rotary(interleaved: bool) -> Check:
    def check() -> float:
        query, key = (torch.randn(70, heads, 128, device=DEVICE).to(BF16) for heads in (32, 8))
        positions = torch.randint(0, 4000, (70,), device=DEVICE)
        angles = torch.randn(4000, 64, device=DEVICE)
        cache = torch.cat([angles.cos(), angles.sin()], -1)
        arguments = (positions, query, key, cache)
        result = kernels.rotary_embedding(*arguments, interleaved=interleaved)
        expected = rotary_embedding_reference(*arguments, interleaved=interleaved)
        return max(worst(one, other) for one, other in zip(result, expected, strict=True))

    return check


def norms() -> float:
    found = 0.0
    for size in (576, 4096, 8192):
        x, residual = torch.randn(2, 33, size, device=DEVICE).to(BF16)
        weight = torch.randn(size, device=DEVICE).to(BF16)
        result, total = kernels.fused_add_rms_norm(x, residual, weight, 1e-5)
        wide = (x + residual).float()
        expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()
        found = max(found, worst(total, x + residual), worst(result, expected))
        expected = torch.nn.functional.layer_norm(x.float(), (size,), weight.float(), None, 1e-5)
        found = max(found, worst(kernels.layer_norm(x, weight, None, 1e-5)[0], expected))
    return found


def activations() -> float:
    x = 3 * torch.randn(33, 2 * 1500, device=DEVICE).to(BF16)
    gate, up = x.float().chunk(2, -1)
    functions = torch.nn.functional
    pairs = (
        (kernels.silu_and_mul(x), functions.silu(gate) * up),
        (kernels.gelu_and_mul(x), functions.gelu(gate) * up),
        (
            kernels.gelu_and_mul(x, approximate="tanh"),
            functions.gelu(gate, approximate="tanh") * up,
        ),
    )
    return max(worst(one, other) for one, other in pairs)


def product(kind: str, num_tokens: int) -> Check:
    def check() -> float:
        x = torch.randn(num_tokens, 4096, device=DEVICE).to(BF16)
        wide = torch.randn(1000, 4096, device=DEVICE) / 64
        if kind == "e4m3":
            scales = wide.abs().amax(1, keepdim=True) / 448
            weight = pack_fp8_weight((wide / scales).to(E4M3), scales)
        else:
            weight = quantize_weight(wide, kind)
        result = kernels.grouped_matmul(x, kernels.group_weight(weight))
        # Weights are rounded to the type of x, as the kernel does.
        expected = x.double() @ unpack_weight(weight).to(BF16).double().T
        return worst(result, expected)

    return check


def scaled_product() -> float:
    x, wide = (torch.randn(rows, 4096, device=DEVICE) / 64 for rows in (65, 1000))
    found = 0.0
    kinds = [torch.int8] if torch.cuda.get_device_capability() < (8, 9) else [torch.int8, E4M3]
    for kind in kinds if torch.version.hip is None else kinds[:1]:
        weight, scales = kernels.quantize_rows(wide, kind)
        codes, token_scales = kernels.quantize_rows(x, kind)
        result = kernels.scaled_matmul(x, weight, scales)
        expected = (codes.double() * token_scales[:, None].double()) @ (
            weight.double() * scales[:, None].double()
        ).T
        found = max(found, worst(result, expected))
    return found


def experts() -> float:
    x = torch.randn(50, 512, device=DEVICE).to(BF16)
    gate_up, down = (
        (torch.randn(8, *shape, device=DEVICE) / 16).to(BF16) for shape in ((768, 512), (512, 384))
    )
    biases = {
        name: (torch.randn(8, size, device=DEVICE) / 16).to(BF16)
        for name, size in (("gate_up_bias", 768), ("down_bias", 512))
    }
    weights, ids = torch.rand(50, 8, device=DEVICE).topk(2)
    result = kernels.stacked_moe(x, gate_up, down, weights, ids, kernels.silu_and_mul, **biases)
    expected = stacked_moe_reference(
        *(x.float(), gate_up.float(), down.float(), weights, ids, silu_and_mul_reference),
        **{name: bias.float() for name, bias in biases.items()},
    )
    return worst(result, expected)


def sampling() -> float:
    rows = 400
    logits = 3 * torch.randn(rows, 50_000, device=DEVICE)
    kinds = np.arange(rows) % 5
    metadata = SamplingMetadata(
        temperature=np.where(kinds == 0, 0, 0.8).astype(np.float32),
        top_k=np.where(kinds >= 2, 40, 0).astype(np.int32),
        top_p=np.where(kinds >= 3, 0.9, 1).astype(np.float32),
        min_p=np.where(kinds == 4, 0.05, 0).astype(np.float32),
        seeds=np.arange(rows),
        positions=np.arange(rows) * 7,
    )
    different = kernels.sample(logits, metadata) != sample_reference(logits, metadata)
    return different.float().mean().item()


def logprobs() -> float:
    logits = 3 * torch.randn(20, 50_000, device=DEVICE)
    token_ids = torch.randint(0, 50_000, (20,), device=DEVICE)
    result = kernels.compute_logprobs(logits, token_ids, 5)
    expected = compute_logprobs_reference(logits, token_ids, 5)
    return max(worst(one, other) for one, other in zip(result, expected, strict=True))


def masks() -> float:
    logits = torch.randn(9, 50_000, device=DEVICE)
    tokens = torch.randint(0, 50_000, (9, 3000), dtype=torch.int32, device=DEVICE)
    lengths = torch.randint(0, 3000, (2, 9), device=DEVICE).sort(0).values
    penalties = torch.rand(3, 9, device=DEVICE) + 0.5
    words = torch.randint(-(2**31), 2**31 - 1, (2, 1563), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([8, 1], device=DEVICE)
    expected = logits.clone()
    apply_penalties_reference(expected, tokens, *lengths, *penalties)
    apply_bitmask_reference(expected, words, rows)
    kernels.apply_penalties(logits, tokens, *lengths, *penalties)
    kernels.apply_bitmask(logits, words, rows)
    return worst(logits, expected)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA or ROCm device here")
    # The twins have to be the twins, whatever else is installed.
    os.environ["OCTAVO_KERNELS"] = "reference"
    sys.exit(main())
