"""Attention and sampling on the CPU: microseconds a call, alternately with torch.

    nox -s bench -- attention
    nox -s bench -- attention --rounds 30

Shapes are those of the starter model (9 query and 3 KV heads of 64, 49,152 tokens). Every
implementation is timed once in each round, so that a noisy machine is noisy for all; the
smallest and the median are printed. Caches are larger than what a core keeps, and taken in
turn, so that keys and values come from memory as they do in a model with many layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo_kernels import (
    AttentionMetadata,
    HugePageMemory,
    SamplingMetadata,
    compute_logprobs,
    paged_attention,
    sample,
)
from octavo_kernels.cpu.threads import get_num_threads
from octavo_kernels.sample import sample_reference

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, VOCAB_SIZE = 9, 3, 64, 16, 49152
CACHE_BYTES = 1 << 27

# Requests, query tokens of each, context, and how much of it all of them share.
SHAPES = (
    (1, 1, 256, 0),
    (1, 1, 4096, 0),
    (4, 1, 576, 512),
    (32, 1, 192, 0),
    (32, 1, 576, 0),
    (32, 1, 576, 512),
    (1, 512, 512, 0),
)

Contender = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(get_num_threads())
    print(f"{get_num_threads()} threads, us: smallest / median of {rounds} rounds")
    for num_rows, query_len, context, shared in SHAPES:
        name = f"attention {num_rows} x {query_len} over {context}, {shared} shared"
        report(name, attention_contenders(num_rows, query_len, context, shared), rounds)
    for num_rows in (1, 32):
        report(f"sampling {num_rows} rows", sampling_contenders(num_rows), rounds)


def report(name: str, contenders: dict[str, Contender], rounds: int) -> None:
    """Time the contenders in turn, and print a line for each."""
    times: dict[str, list[float]] = {label: [] for label in contenders}
    for call in contenders.values():
        call()  # compiles, and wakes the threads
    for _ in range(rounds):
        for label, call in contenders.items():
            call()
            start = time.perf_counter()
            for _ in range(5):
                call()
            times[label].append((time.perf_counter() - start) / 5 * 1e6)
    print(name)
    for label, found in times.items():
        print(f"  {label:24} {min(found):9.0f} {statistics.median(found):9.0f}", flush=True)


def attention_contenders(
    num_rows: int, query_len: int, context: int, shared: int
) -> dict[str, Contender]:
    """Our kernel over several types of cache, and torch over dense float32 tensors."""
    metadata = make_metadata(num_rows, query_len, context, shared)
    query = torch.randn(num_rows * query_len, NUM_HEADS, HEAD_DIM)
    found: dict[str, Contender] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8):
        caches = make_caches(metadata, dtype)
        scales = {}
        if dtype == torch.int8:
            names = ("key_scale", "value_scale")
            scales = {name: torch.rand(caches[0][0].shape[:3]) / 100 for name in names}
        found[str(dtype).removeprefix("torch.")] = in_turn(
            caches,
            lambda k, v, s=scales: paged_attention(query, k, v, metadata, HEAD_DIM**-0.5, **s),
        )
    shape = (num_rows, NUM_KV_HEADS, context, HEAD_DIM)
    copies = max(2, CACHE_BYTES // (8 * num_rows * NUM_KV_HEADS * context * HEAD_DIM))
    dense = [(torch.randn(shape), torch.randn(shape)) for _ in range(min(copies, 64))]
    grouped = query.view(num_rows, query_len, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    found["torch SDPA float32"] = in_turn(
        dense,
        lambda k, v: scaled_dot_product_attention(
            grouped, k, v, is_causal=query_len > 1, enable_gqa=True
        ),
    )
    return found


def in_turn(
    caches: list[tuple[Tensor, Tensor]], call: Callable[[Tensor, Tensor], object]
) -> Contender:
    """Call with one pair of caches after the other."""
    state = {"next": 0}

    def run() -> object:
        state["next"] = (state["next"] + 1) % len(caches)
        return call(*caches[state["next"]])

    return run


def make_metadata(num_rows: int, query_len: int, context: int, shared: int) -> AttentionMetadata:
    """Requests of one length that share their first positions, their blocks shuffled."""
    blocks = torch.randperm(num_rows * context // BLOCK_SIZE).to(torch.int32).view(num_rows, -1)
    blocks[:, : shared // BLOCK_SIZE] = blocks[0, : shared // BLOCK_SIZE]
    starts = [query_len * row for row in range(num_rows + 1)]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.full((num_rows,), context, dtype=torch.int32),
        block_tables=blocks,
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int32),
        host_query_start_loc=starts,
        host_seq_lens=[context] * num_rows,
        block_size=BLOCK_SIZE,
    )


def make_caches(metadata: AttentionMetadata, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """As many caches as fill `CACHE_BYTES`, two at least and 64 at most."""
    shape = (metadata.block_tables.numel(), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    one = (torch.randn(shape) * 9).to(dtype)
    count = max(2, min(64, CACHE_BYTES // (2 * one.numel() * one.element_size())))
    memory = HugePageMemory()  # as the engine's are
    return [(memory.keep(one), memory.keep(one.flip(0))) for _ in range(count)]


def sampling_contenders(num_rows: int) -> dict[str, Contender]:
    """Choosing tokens in each way, and their log-probabilities."""
    logits = torch.randn(num_rows, VOCAB_SIZE) * 3
    found: dict[str, Contender] = {
        "greedy": lambda: sample(logits, parameters(num_rows, temperature=0.0)),
        "temperature": lambda: sample(logits, parameters(num_rows)),
        "top-k 50": lambda: sample(logits, parameters(num_rows, top_k=50)),
        "top-p 0.9": lambda: sample(logits, parameters(num_rows, top_p=0.9)),
        "all filters": lambda: sample(
            logits, parameters(num_rows, top_k=100, top_p=0.9, min_p=0.01)
        ),
        "twin, top-p 0.9": lambda: sample_reference(logits, parameters(num_rows, top_p=0.9)),
    }
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    found["logprobs, 5 a row"] = lambda: compute_logprobs(logits, tokens, 5)
    return found


def parameters(
    num_rows: int, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=np.full(num_rows, temperature, np.float32),
        top_k=np.full(num_rows, top_k, np.int32),
        top_p=np.full(num_rows, top_p, np.float32),
        min_p=np.full(num_rows, min_p, np.float32),
        seeds=np.arange(num_rows),
        positions=np.arange(num_rows),
    )


if __name__ == "__main__":
    main()
