"""vLLM's `LLM` on a CPU, in a type that the command line names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loop import TokenIds, serve_workloads
from vllm import LLM, SamplingParams, TokensPrompt


class Engine:
    def __init__(self, model: str, dtype: str) -> None:
        self.llm = LLM(model, dtype=dtype, max_model_len=2048, max_num_seqs=64)

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        self.llm.generate(inputs, params, use_tqdm=False)


if __name__ == "__main__":
    serve_workloads(Engine(*sys.argv[1:]))
