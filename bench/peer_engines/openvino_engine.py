"""OpenVINO GenAI's continuous batching pipeline, on the GGUF file as it is."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino_genai as genai
from loop import TokenIds, serve_workloads


class Engine:
    def __init__(self, model: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=2
        )

    def generate(self, prompts: Sequence[TokenIds], num_tokens: int) -> None:
        config = genai.GenerationConfig(
            max_new_tokens=num_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        ids = np.array(prompts, np.int64)
        mask = np.ones_like(ids)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask))
        self.pipeline.generate(inputs, config)


if __name__ == "__main__":
    serve_workloads(Engine(sys.argv[1]))
