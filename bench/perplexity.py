"""How much quantized arithmetic costs: perplexity on a fixed text, path by path.

    nox -s bench -- perplexity
    nox -s bench -- perplexity --tokens 600 --model path/to/model.gguf

The exact path (weights unpacked to float32, K and V in float32) is the reference; each line
is another way to run the same weights, with its perplexity and how far that is off. The text
is the first chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865), nearly whole.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import NewRequestData, SchedulerOutput
from octavo_server import LLM
from octavo_worker.executors.uniproc import UniProcExecutor

TEXT = Path(__file__).parent / "data" / "alice.txt"
CHUNK = 256
LIMIT = 0.005  # of the packed path's perplexity, as it is served by default


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    Attributes:
        settings: Keywords of `LLM`.
        kernels: Value of ``OCTAVO_KERNELS``.
    """

    name: str
    settings: dict[str, Any]
    kernels: str = ""


EXACT = Variant("exact", {"quantization": "none"})
DEFAULT = Variant("packed (default)", {})
VARIANTS = (
    EXACT,
    DEFAULT,
    Variant("packed, K and V float32", {"kv_cache_dtype": "float32"}),
    Variant("packed, K and V bfloat16", {"kv_cache_dtype": "bfloat16"}),
    Variant("q8_0 at load", {"quantization": "q8_0"}),
    Variant("w8a8 at load", {"quantization": "w8a8"}),
    Variant("q4_0 at load", {"quantization": "q4_0"}),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the starter model")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of the text")
    arguments = parser.parse_args()
    expected = measure(EXACT, arguments.model, arguments.tokens)
    print(f"{EXACT.name:28} {expected:8.4f}", flush=True)
    off_by_default = 0.0
    for variant in VARIANTS[1:]:
        found = measure(variant, arguments.model, arguments.tokens)
        off = found / expected - 1
        print(f"{variant.name:28} {found:8.4f} {100 * off:+7.3f} %", flush=True)
        if variant is DEFAULT:
            off_by_default = off
    return 0 if abs(off_by_default) <= LIMIT else 1


def measure(variant: Variant, model: str, num_tokens: int) -> float:
    """Load the model as a variant asks, and return its perplexity."""
    os.environ["OCTAVO_KERNELS"] = variant.kernels
    settings = {"max_model_len": 8192, "max_num_seqs": 1, "kv_cache_memory": "1GiB"}
    with LLM(model, **(settings | variant.settings)) as llm:
        token_ids = llm.tokenizer.encode(TEXT.read_text())[:num_tokens]
        return perplexity(llm, token_ids)


@torch.inference_mode()
def perplexity(llm: LLM, token_ids: list[int]) -> float:
    """Return exp of the mean negative log-likelihood of each token after the first."""
    executor = llm.engine._executor
    assert isinstance(executor, UniProcExecutor)
    worker = executor._running
    total = 0.0
    for output in one_request(token_ids, llm.engine.config.cache.block_size):
        worker.runner.batch.apply(output)
        model_input = worker.runner.prepare_input(output)
        hidden = worker.runner.forward(model_input, worker.runner.kv_caches)
        logprobs = worker.model.compute_logits(hidden).log_softmax(dim=-1)
        first = output.num_computed_tokens[0]
        following = torch.tensor(token_ids[first + 1 : first + 1 + len(hidden)])
        found = logprobs[: len(following)].gather(1, following.unsqueeze(1))
        total -= float(found.double().sum())
    return math.exp(total / (len(token_ids) - 1))


def one_request(token_ids: list[int], block_size: int) -> list[SchedulerOutput]:
    """Lay out the steps that compute `token_ids` in chunks, in slot 0 and blocks from 0."""
    request = NewRequestData(
        slot=0,
        request_id="text",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=SamplingParams(),
        block_tables=[list(range(-(-len(token_ids) // block_size)))],
        num_computed_tokens=0,
    )
    return [
        SchedulerOutput(
            step_id=first,
            freed_slots=[],
            new_requests=[request] if first == 0 else [],
            new_block_ids=[],
            slots=[0],
            num_scheduled_tokens=[min(CHUNK, len(token_ids) - first)],
            num_computed_tokens=[first],
        )
        for first in range(0, len(token_ids), CHUNK)
    ]


if __name__ == "__main__":
    sys.exit(main())
