"""Every family against transformers, through the engine's own steps.

One engine a family has so few tokens in a step that prompts are computed in pieces, and so
few blocks that requests are preempted, and meets a prompt again that is in its cache.
"""

from __future__ import annotations

import pytest
import torch

from octavo_core.engine_core import EngineCore
from octavo_core.kv_cache_layout import lay_out_kv_cache
from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_worker.executors.uniproc import UniProcExecutor
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from support.one_prompt import prompt_logits
from support.tiny_families import FALLBACKS, FAMILIES, VOCAB_SIZE, save_family

# Both compute in float32 and sum in another order. Logits are of order one.
TOLERANCE = 1e-4
CPU = torch.device("cpu")
MAX_TOKENS = 12
LONGEST = 33 + MAX_TOKENS
BLOCK_SIZE = 8
STEP_TOKENS = 16


class Engine:
    """An engine that notes the logits behind every sampled token."""

    def __init__(self, config, path):
        spec = read_model_spec(path)
        executor = UniProcExecutor(config, spec)
        self.core = EngineCore(config, spec, executor)
        self.core.start(lambda *_: None)
        self.spec = spec
        self.worker = executor._worker
        self.logits = {}  # by all tokens before
        runner = self.worker.runner
        sample = runner._sample

        @torch.inference_mode()
        def note(step, grammar):
            if len(step.rows):
                logits = self.worker.model.compute_logits(step.hidden)
                for slot, row in zip(step.slots.tolist(), logits, strict=True):
                    known = runner.batch.token_ids[slot, : runner.batch.num_tokens[slot]]
                    self.logits[tuple(known.tolist())] = row
            return sample(step, grammar)

        runner._sample = note

    def generate(self, prompts, max_tokens=MAX_TOKENS):
        """Run requests together; returns each prompt with its answer."""
        answers = {}
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
            self.core.add_request(EngineCoreRequest(str(index), prompt, params))
            answers[str(index)] = list(prompt)
        while self.core.has_unfinished_requests():
            for output in self.core.step().outputs:
                assert output.error is None, output.error
                answers[output.request_id] += output.new_token_ids
        return list(answers.values())


def _few_blocks(spec):
    """Blocks for the longest request, and a little more: not for the others beside it."""
    layout = lay_out_kv_cache(spec.layers, block_size=BLOCK_SIZE, dtype_bytes=4)
    return layout.blocks_per_request(LONGEST, STEP_TOKENS) + len(layout.groups)


@torch.inference_mode()
def _check(engine, reference, sequence, num_prompt_tokens):
    """Compare every step's logits of one sequence, and its greedy tokens."""
    expected = reference(torch.tensor([sequence])).logits[0].float()
    for length in range(num_prompt_tokens, len(sequence)):
        found = engine.logits[tuple(sequence[:length])]
        torch.testing.assert_close(found, expected[length - 1], rtol=0, atol=TOLERANCE)
        assert sequence[length] == int(expected[length - 1].argmax())


@pytest.mark.parametrize("family", [*FAMILIES, *FALLBACKS])
def test_family_matches_transformers(family, make_config, tmp_path):
    reference = save_family(family, tmp_path)
    config = make_config(
        tmp_path,
        quantization="none",
        cpu_threads=1,  # two would spend most of their time waiting for each other
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=_few_blocks(read_model_spec(tmp_path)),
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=5,
        max_model_len=LONGEST,
    )
    engine = Engine(config, tmp_path)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,)).tolist() for length in (33, 21, 1, 2, 3)]
    sequences = engine.generate(prompts)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert len(sequence) == len(prompt) + MAX_TOKENS
        _check(engine, reference, sequence, len(prompt))
    assert engine.core.stats().num_preemptions > 0
    engine.generate([prompts[0]])
    again = [*prompts[0][:28], 5, 6, 7]
    before = engine.core.stats()
    (sequence,) = engine.generate([again])
    _check(engine, reference, sequence, len(again))
    assert engine.core.stats().prefix_cache_hits > before.prefix_cache_hits


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3"])
def test_evicted_blocks_come_back_from_the_host(family, make_config, tmp_path):
    """Also where layers of several groups share memory, or keep latents."""
    reference = save_family(family, tmp_path)
    config = make_config(
        tmp_path,
        quantization="none",
        cpu_threads=1,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=_few_blocks(read_model_spec(tmp_path)),
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=2,
        max_model_len=LONGEST,
        swap_space=1 << 22,
    )
    engine = Engine(config, tmp_path)
    first, *others = (torch.randint(0, VOCAB_SIZE, (33,)).tolist() for _ in range(4))
    engine.generate([first])
    for other in others:
        engine.generate([other])
    engine.logits.clear()
    again = [*first[:30], 7, 7]
    (sequence,) = engine.generate([again])
    assert engine.core.stats().host_cache_hits > 0
    _check(engine, reference, sequence, len(again))


FITTING = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
ONE_CALL = {"llama", "qwen2", "qwen3", "mistral", "phi4", "gemma2", "gemma3"}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", FITTING),
        ("qwen2", FITTING),
        ("qwen3", FITTING),
        ("mistral", FITTING),
        ("phi4", {**FITTING, "head_dim": 64}),
        ("gemma3", FITTING),
        ("gemma2", FITTING),
        ("opt", {}),
        ("gpt2", {}),
        ("mixtral", FITTING),
        ("qwen3-moe", {}),
        ("gpt-oss", FITTING),
    ],
)
def test_packed_weights_give_the_same_logits(family, changes, tmp_path):
    """Weights packed as they are stored: the numbers are the same, the kernels are others."""
    reference = save_family(family, tmp_path, **changes)
    spec = read_model_spec(tmp_path)
    weights = load_weights(spec, tmp_path, WeightForm(torch.float32, "auto"), CPU, lambda *_: None)
    assert any(isinstance(weight, tuple) for weight in weights.values())
    model = resolve_model_class(spec)(spec, weights, 64, CPU)
    assert (getattr(model, "_decoder", None) is not None) == (family in ONE_CALL)
    token_ids = torch.randint(0, VOCAB_SIZE, (40,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(
        prompt_logits(model, spec, token_ids), expected, rtol=0, atol=TOLERANCE
    )
