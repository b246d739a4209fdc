"""transformers' `generate` in float32, which takes a GGUF file by unpacking it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from loop import TokenIds, serve_workloads
from transformers import AutoModelForCausalLM


class Engine:
    def __init__(self, model: str) -> None:
        torch.set_num_threads(2)
        path = Path(model)
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )


if __name__ == "__main__":
    serve_workloads(Engine(sys.argv[1]))
