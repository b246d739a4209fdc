"""vLLM's `LLM` on a CPU, in float32: its quickest format where there is no AVX-512."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loop import TokenIds, serve_workloads
from vllm import LLM, SamplingParams, TokensPrompt


class Engine:
    def __init__(self, model: str) -> None:
        self.llm = LLM(model, dtype="float32", max_model_len=2048, max_num_seqs=64)

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        self.llm.generate(inputs, params, use_tqdm=False)


if __name__ == "__main__":
    serve_workloads(Engine(sys.argv[1]))
