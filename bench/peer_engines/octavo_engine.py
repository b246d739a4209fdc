"""Octavo's `LLM`, with its defaults."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loop import TokenIds, serve_workloads

from octavo_core.sampling_params import SamplingParams
from octavo_server import LLM


class Engine:
    def __init__(self, model: str) -> None:
        self.llm = LLM(model)

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        self.llm.generate(list(prompts), params, use_tqdm=False)


if __name__ == "__main__":
    serve_workloads(Engine(sys.argv[1]))
