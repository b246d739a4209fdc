"""What a server does when a request of full length has no room in the KV cache."""

from __future__ import annotations

import re
import subprocess
import sys

from octavo_server import LLM, SamplingParams

# 22.5 KiB a token in float16: 28 blocks of 16 tokens.
SMALL = "10MiB"


def test_auto_takes_the_longest_that_fits_and_it_can_be_used() -> None:
    with LLM(max_model_len="auto", kv_cache_memory=SMALL) as llm:
        limit = llm.engine.scheduler.max_model_len
        params = SamplingParams(max_tokens=4096, temperature=0, ignore_eos=True)
        (answer,) = llm.generate(["The sky is"], params, use_tqdm=False)
    assert limit == 448
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == limit
    assert answer.outputs[0].finish_reason == "length"


def test_without_it_the_server_says_what_would_fit() -> None:
    command = [sys.executable, "-m", "octavo_server", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "--kv-cache-memory", SMALL], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "max_model_len is 8192 (from default)" in line
    assert "--max-model-len 448 (or auto)" in line
    needed = re.search(r"--kv-cache-memory (\d+)", line)
    assert needed is not None
    assert int(needed[1]) == 8192 * 45 * 512
