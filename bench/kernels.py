"""Speed of the CPU kernels, beside what the machine can do and beside torch.

    nox -s bench -- kernels
    nox -s bench -- kernels --kinds q4_1 q8_0 --threads 2

Each line gives the best and the median of alternating rounds: a round runs every contestant
of a line once, so that what else the machine does meets all of them. M = 1 is memory-bound
and given in GB/s of weight bytes; more rows are given in GFLOP/s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

from octavo_kernels import (
    AttentionMetadata,
    Decoder,
    DecoderLayer,
    PackedWeight,
    embed_tokens,
    pack_dense_weight,
    pack_weight,
    quantize_weight,
    quantized_matmul,
    rms_norm,
    silu_and_mul,
)
from octavo_kernels.cpu.jit import Kernel, on_compile
from octavo_kernels.cpu.threads import Team, default_num_threads, set_num_threads
from octavo_kernels.machine import Machine, measure_machine
from octavo_kernels.packed_weight import DENSE_KINDS, WEIGHT_KINDS
from octavo_kernels.rms_norm import rms_norm_reference
from octavo_kernels.silu_and_mul import silu_and_mul_reference

SHAPES = [(3072, 576), (49152, 576), (8192, 2048)]
ROWS = [1, 4, 32, 512]
# Weights that one round of M = 1 goes through: beyond an L3 of 32 MB.
COLD_BYTES = 100 << 20

# The starter model, SmolLM2-135M.
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 30, 576, 9, 3, 64, 1536, 49152

Contestant = tuple[str, Callable[[], object]]


def main() -> int:
    arguments = parse_arguments()
    set_num_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    on_compile(lambda name, seconds: None if seconds is None else note(name, seconds))
    machine = measure_machine()
    print(
        f"{arguments.threads} threads: reads {machine.read_bandwidth / 1e9:.1f} GB/s, copies "
        f"{machine.copy_bandwidth / 1e9:.1f} GB/s, float32 peak {machine.fp32_peak / 1e9:.0f} "
        f"GFLOP/s, barrier {machine.barrier * 1e6:.2f} us"
    )
    for kind in arguments.kinds:
        for rows, inputs in SHAPES:
            matmuls(kind, rows, inputs, machine, arguments.rounds)
    elementwise(arguments.rounds)
    steps("q4_1", arguments.rounds)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["q4_1", "q4_0", "q8_0", "q4_k", "q6_k", "w8a8", "f32", "bf16"],
        choices=list(WEIGHT_KINDS),
    )
    return parser.parse_args()


def note(name: str, seconds: float) -> None:
    print(f"  compiled {name} in {seconds:.1f} s", file=sys.stderr)


def compare(contestants: Sequence[Contestant], rounds: int) -> dict[str, tuple[float, float]]:
    """Run contestants in turn; return the best and the median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name, _ in contestants}
    for round_number in range(rounds + 1):
        for name, run in contestants:
            start = time.perf_counter()
            run()
            if round_number:
                times[name].append(time.perf_counter() - start)
    return {name: (min(found), statistics.median(found)) for name, found in times.items()}


def make_weight(kind: str, rows: int, inputs: int) -> PackedWeight:
    """Make a weight of small random numbers."""
    if kind in DENSE_KINDS:
        return pack_dense_weight(torch.randn(rows, inputs).to(DENSE_KINDS[kind]))
    if kind == "w8a8":
        return quantize_weight(torch.randn(rows, inputs), kind)
    block, block_bytes = WEIGHT_KINDS[kind].block, WEIGHT_KINDS[kind].block_bytes
    raw = torch.randint(0, 256, (rows, inputs // block, block_bytes), dtype=torch.uint8)
    scale = torch.tensor([0, 20], dtype=torch.uint8)  # 0.001 as float16
    if kind == "q6_k":
        raw[..., -2:] = scale
    else:
        raw[..., :2], raw[..., 2:4] = scale, torch.tensor([0, 152])
    return pack_weight(raw.flatten(), kind, (rows, inputs))


def matmuls(kind: str, rows: int, inputs: int, machine: Machine, rounds: int) -> None:
    if inputs % WEIGHT_KINDS[kind].block:
        return
    first = make_weight(kind, rows, inputs)
    for num_tokens in ROWS:
        cold = num_tokens <= 4
        copies = min(max(1, COLD_BYTES // first.num_bytes), 64) if cold else 1
        weights = [first] + [make_weight(kind, rows, inputs) for _ in range(copies - 1)]
        plain = [torch.randn(rows, inputs) for _ in range(max(1, copies // 4))]
        x = torch.randn(num_tokens, inputs)
        times = compare(
            [
                ("octavo", lambda w=weights, x=x: [quantized_matmul(x, weight) for weight in w]),
                ("torch float32", lambda w=plain, x=x: [x @ weight.t() for weight in w]),
            ],
            rounds if num_tokens < 512 else max(3, rounds // 5),
        )
        for name, sizes in (("octavo", weights), ("torch float32", plain)):
            best, median = (seconds / len(sizes) for seconds in times[name])
            flops = 2.0 * num_tokens * rows * inputs
            num_bytes = first.num_bytes if name == "octavo" else 4 * rows * inputs
            if cold:
                share = num_bytes / best / machine.read_bandwidth
                speed = f"{num_bytes / best / 1e9:6.1f} GB/s ({share:4.0%} of reading)"
            else:
                share = flops / best / machine.fp32_peak
                speed = f"{flops / best / 1e9:6.0f} GFLOP/s ({share:4.0%} of float32 peak)"
            label = f"{kind} {rows}x{inputs} M={num_tokens}"
            print(f"{label:26} {name:14} {best * 1e6:9.1f} us (median {median * 1e6:9.1f}) {speed}")


def elementwise(rounds: int) -> None:
    weight = torch.ones(HIDDEN)
    for num_tokens in (1, 32, 512):
        x, gate_up = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, 2 * FFN)
        for name, ours, twin in [
            (
                "rms_norm",
                lambda x=x: rms_norm(x, weight, 1e-5),
                lambda x=x: rms_norm_reference(x, weight, 1e-5),
            ),
            (
                "silu_and_mul",
                lambda x=gate_up: silu_and_mul(x),
                lambda x=gate_up: silu_and_mul_reference(x),
            ),
        ]:
            times = compare([("octavo", ours), ("torch", twin)], rounds)
            print(
                f"{name} M={num_tokens}: octavo {times['octavo'][0] * 1e6:.1f} us, "
                f"torch {times['torch'][0] * 1e6:.1f} us"
            )


def steps(kind: str, rounds: int) -> None:
    """A whole decode step of the starter model's shape, and what of it is outside the kernels."""
    qkv_size = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layers = [
        DecoderLayer(
            input_norm=torch.ones(HIDDEN),
            qkv=[make_weight(kind, qkv_size, HIDDEN)],
            output=make_weight(kind, HIDDEN, HEADS * HEAD_DIM),
            ffn_norm=torch.ones(HIDDEN),
            gate_up=[make_weight(kind, 2 * FFN, HIDDEN)],
            down=make_weight(kind, HIDDEN, FFN),
        )
        for _ in range(LAYERS)
    ]
    head = make_weight(kind, VOCAB, HIDDEN)
    angles = torch.outer(torch.arange(2048.0), 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    decoder = Decoder(layers, torch.ones(HIDDEN), HEADS, KV_HEADS, HEAD_DIM, 1e-5, cos_sin)
    for batch, context, dtype in [
        (1, 256, torch.float32),
        (1, 256, torch.bfloat16),
        (32, 256, torch.float32),
        (32, 256, torch.bfloat16),
    ]:
        step = make_step(decoder, head, batch, context, dtype)
        times = compare([("one call", step), ("op by op", lambda s=step: s(True))], rounds)
        best = times["one call"][0]
        print(
            f"decode step, batch {batch}, context {context}, {dtype} cache: {best * 1e3:.2f} ms "
            f"({batch / best:.0f} tokens/s), op by op {times['op by op'][0] * 1e3:.2f} ms; "
            f"outside the kernels {outside_the_kernels(step, rounds):.1%}"
        )


def make_step(
    decoder: Decoder, head: PackedWeight, batch: int, context: int, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """Make a function that decodes one token for each of `batch` requests."""
    block_size = 16
    blocks = -(-context // block_size)
    shape = (batch * blocks, KV_HEADS, block_size, HEAD_DIM)
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(LAYERS)]
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    slots = table[:, (context - 1) // block_size].long() * block_size + (context - 1) % block_size
    starts, lengths = list(range(batch + 1)), [context] * batch
    ids = torch.randint(0, VOCAB, (batch,))
    positions = torch.full((batch,), context - 1, dtype=torch.int32)

    def step(op_by_op: bool = False) -> Tensor:
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=table,
            slot_mapping=slots,
            host_query_start_loc=starts,
            host_seq_lens=lengths,
            block_size=block_size,
        )
        run = decoder.forward_reference if op_by_op else decoder.forward
        hidden = embed_tokens(ids, head)
        return quantized_matmul(run(hidden, positions, caches, metadata, HEAD_DIM**-0.5), head)

    return step


def outside_the_kernels(step: Callable[..., Tensor], rounds: int) -> float:
    """Median share of a step that is not spent in compiled code."""
    launch, spent = Team.run, [0.0]

    def timed(self: Team, kernel: Kernel, arguments: tuple[float, ...]) -> None:
        start = time.perf_counter()
        launch(self, kernel, arguments)
        spent[0] += time.perf_counter() - start

    shares = []
    with mock.patch.object(Team, "run", timed):
        for _ in range(2 * rounds):
            spent[0] = 0.0
            start = time.perf_counter()
            step()
            shares.append(1 - spent[0] / (time.perf_counter() - start))
    return statistics.median(shares)


if __name__ == "__main__":
    sys.exit(main())
