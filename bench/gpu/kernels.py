"""Time the Triton kernels on a GPU beside torch's and the limits of the device.

    PYTHONPATH=packages/kernels/src python bench/gpu/kernels.py [--only TEXT] [--json FILE]

Needs torch, triton, numpy and a CUDA or ROCm device, and none of the other packages. Memory
bandwidth is that of a large copy, measured in the same run. Ours and torch's are timed
alternately, and the median of 7 rounds is taken; each round is a captured graph of 20 calls, so
that launching from Python does not count. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo_kernels import AttentionMetadata
from octavo_kernels import triton as kernels
from octavo_kernels.quantize_weight import quantize_weight

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
ROUNDS, CALLS = 7, 20
BLOCK_SIZE = 16

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: What is computed.
        ours: Calls our kernel.
        theirs: By name, calls of torch that compute the same.
        num_bytes: That have to be read and written at least.
        num_operations: Of matrix products, a multiplication and an addition being two.
    """

    name: str
    ours: Call
    theirs: dict[str, Call]
    num_bytes: int
    num_operations: int = 0


@dataclass(frozen=True)
class Figure:
    """What was measured: microseconds, and what that makes of the device."""

    name: str
    kernel: str
    microseconds: float
    gigabytes_per_second: float
    share_of_bandwidth: float
    teraflops: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", help="a file for the figures")
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA or ROCm device here")
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: a copy moves {bandwidth / 1e9:.0f} GB/s")
    figures = []
    for case in cases():
        if flags.only not in case.name:
            continue
        for kernel, seconds in measure({"octavo": case.ours, **case.theirs}).items():
            figure = Figure(
                case.name,
                kernel,
                round(seconds * 1e6, 1),
                round(case.num_bytes / seconds / 1e9, 1),
                round(case.num_bytes / seconds / bandwidth, 3),
                round(case.num_operations / seconds / 1e12, 1),
            )
            figures.append(asdict(figure))
            print(
                f"{figure.name:44} {kernel:8} {figure.microseconds:9.1f} us "
                f"{figure.gigabytes_per_second:7.0f} GB/s {figure.share_of_bandwidth:6.1%} "
                f"{figure.teraflops:6.1f} TFLOP/s",
                flush=True,
            )
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump({"device": name, "bandwidth": bandwidth, "figures": figures}, file, indent=1)
    return 0


def measure(calls: dict[str, Call]) -> dict[str, float]:
    """Return the seconds of each call: medians of rounds that alternate between them."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except Exception as error:
            print(f"  {name} does not run: {type(error).__name__}: {str(error)[:120]}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3 / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """Warm a call up and capture some of it in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def copy_bandwidth() -> float:
    """Return bytes per second of a copy of 1 GiB, reading and writing counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure({"copy": lambda: target.copy_(source)})["copy"]


def cases() -> Iterator[Case]:
    """Yield all comparisons."""
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64)):
        for batch, length in ((1, 4096), (32, 1024), (128, 2048)):
            yield decode_case(batch, length, heads, kv_heads, dim)
        for length in (512, 4096):
            yield prefill_case(length, heads, kv_heads, dim)
    yield latent_case(32, 2048)
    for num_tokens in (1, 16, 128, 2048):
        yield from matmul_cases(num_tokens)
        yield experts_case(num_tokens)
    yield from elementwise_cases()


def make_batch(
    batch: int, query_len: int, length: int, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Build caches for equal requests, their blocks shuffled."""
    blocks = -(-length // BLOCK_SIZE)
    tables = torch.randperm(batch * blocks, device=DEVICE).int().view(batch, blocks)
    starts = list(range(0, batch * query_len + 1, query_len))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        slot_mapping=torch.zeros(batch * query_len, dtype=torch.int32, device=DEVICE),
        host_query_start_loc=starts,
        host_seq_lens=[length] * batch,
        block_size=BLOCK_SIZE,
    )
    shape = (batch * blocks, kv_heads, BLOCK_SIZE, dim)
    keys, values = (torch.randn(shape, dtype=BF16, device=DEVICE) for _ in range(2))
    return keys, values, metadata


def decode_case(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Case:
    """Paged decode, against SDPA over keys that are contiguous already."""
    keys, values, metadata = make_batch(batch, 1, length, kv_heads, dim)
    query = torch.randn(batch, heads, dim, dtype=BF16, device=DEVICE)
    dense = [torch.randn(batch, kv_heads, length, dim, dtype=BF16, device=DEVICE) for _ in "kv"]
    return Case(
        f"decode batch {batch} context {length} heads {heads}/{kv_heads} x {dim}",
        lambda: kernels.paged_attention(query, keys, values, metadata, dim**-0.5),
        {"sdpa": lambda: scaled_dot_product_attention(query.unsqueeze(2), *dense, enable_gqa=True)},
        num_bytes=2 * 2 * batch * length * kv_heads * dim,
        num_operations=4 * batch * length * heads * dim,
    )


def prefill_case(length: int, heads: int, kv_heads: int, dim: int) -> Case:
    """A whole prompt, against SDPA and flex attention over contiguous keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keys, values, metadata = make_batch(1, length, length, kv_heads, dim)
    query = torch.randn(length, heads, dim, dtype=BF16, device=DEVICE)
    q = query.transpose(0, 1).unsqueeze(0)
    dense = [torch.randn(1, kv_heads, length, dim, dtype=BF16, device=DEVICE) for _ in "kv"]
    mask = create_block_mask(
        lambda b, h, q_at, k_at: q_at >= k_at, None, None, length, length, device="cuda"
    )
    flex = torch.compile(flex_attention)
    return Case(
        f"prefill {length} heads {heads}/{kv_heads} x {dim}",
        lambda: kernels.paged_attention(query, keys, values, metadata, dim**-0.5),
        {
            "sdpa": lambda: scaled_dot_product_attention(
                q, *dense, is_causal=True, enable_gqa=True
            ),
            "flex": lambda: flex(q, *dense, block_mask=mask, enable_gqa=True),
        },
        num_bytes=2 * (2 * length * heads * dim + 2 * length * kv_heads * dim),
        num_operations=2 * length * length * heads * dim,
    )


def latent_case(batch: int, length: int) -> Case:
    """Latent attention of DeepSeek's size with 128 heads."""
    latents, _, metadata = make_batch(batch, 1, length, 1, 576)
    query = torch.randn(batch, 128, 576, dtype=BF16, device=DEVICE)
    return Case(
        f"latent decode batch {batch} context {length}",
        lambda: kernels.mla_decode(query, latents[:, 0], metadata, 0.05, 512),
        {},
        num_bytes=2 * batch * length * 576,
        num_operations=2 * batch * length * 128 * (576 + 512),
    )


def experts_case(num_tokens: int) -> Case:
    """A mixture of Qwen3-30B-A3B's size: 8 of 128 experts, with as few as that for a token."""
    count, hidden, width, chosen = 128, 2048, 768, 8
    x = torch.randn(num_tokens, hidden, dtype=BF16, device=DEVICE)
    gate_up = torch.randn(count, 2 * width, hidden, dtype=BF16, device=DEVICE)
    down = torch.randn(count, hidden, width, dtype=BF16, device=DEVICE)
    weights, ids = torch.rand(num_tokens, count, device=DEVICE).topk(chosen)
    read = len(ids.unique()) * 3 * hidden * width
    return Case(
        f"experts {num_tokens} x {chosen} of {count} x {hidden} x {width}",
        lambda: kernels.stacked_moe(x, gate_up, down, weights, ids, kernels.silu_and_mul),
        {},
        num_bytes=2 * (read + 2 * num_tokens * hidden),
        num_operations=2 * num_tokens * chosen * 3 * hidden * width,
    )


def matmul_cases(num_tokens: int) -> Iterator[Case]:
    """Products with packed weights, against the dense product in bfloat16."""
    rows, inputs = 14336, 4096
    x = torch.randn(num_tokens, inputs, dtype=BF16, device=DEVICE)
    dense = torch.randn(rows, inputs, dtype=BF16, device=DEVICE)
    operations = 2 * num_tokens * rows * inputs
    traffic = 2 * num_tokens * (rows + inputs)
    for kind, bits in (("q4_0", 4.5), ("q8_0", 8.5)):
        weight = kernels.group_weight(quantize_weight(dense, kind))
        yield Case(
            f"{kind} {num_tokens} x {rows} x {inputs}",
            lambda weight=weight: kernels.grouped_matmul(x, weight),
            {"bf16": lambda: x @ dense.T},
            num_bytes=int(rows * inputs * bits / 8) + traffic,
            num_operations=operations,
        )
    codes, scales = kernels.quantize_rows(dense, torch.int8)
    yield Case(
        f"w8a8 {num_tokens} x {rows} x {inputs}",
        lambda: kernels.scaled_matmul(x, codes, scales),
        {"bf16": lambda: x @ dense.T},
        num_bytes=rows * inputs + traffic,
        num_operations=operations,
    )


def elementwise_cases() -> Iterator[Case]:
    """What is bound by memory."""
    x, residual = torch.randn(2, 2048, 4096, dtype=BF16, device=DEVICE)
    weight = torch.randn(4096, dtype=BF16, device=DEVICE)
    yield Case(
        "fused_add_rms_norm 2048 x 4096",
        lambda: kernels.fused_add_rms_norm(x, residual, weight, 1e-5),
        {"torch": lambda: torch.nn.functional.rms_norm(x + residual, (4096,), weight, 1e-5)},
        num_bytes=4 * x.numel() * 2,
    )
    gated = torch.randn(2048, 2 * 14336, dtype=BF16, device=DEVICE)
    gate, up = gated.chunk(2, -1)
    yield Case(
        "silu_and_mul 2048 x 14336",
        lambda: kernels.silu_and_mul(gated),
        {"torch": lambda: torch.nn.functional.silu(gate) * up},
        num_bytes=3 * gate.numel() * 2,
    )
    key, value = torch.randn(2, 2048, 8, 128, dtype=BF16, device=DEVICE)
    caches = [torch.zeros(256, 8, 16, 128, dtype=BF16, device=DEVICE) for _ in "kv"]
    slots = torch.randperm(4096, device=DEVICE)[:2048]
    yield Case(
        "write_kv_cache 2048 x 8 x 128",
        lambda: kernels.write_kv_cache(key, value, *caches, slots),
        {},
        num_bytes=4 * key.numel() * 2,
    )


if __name__ == "__main__":
    sys.exit(main())
