"""Log-probabilities of prompts, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_worker import token_logprobs
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.model_runner import ModelRunner
from octavo_worker.models import KVCache, resolve_model_class

CPU = torch.device("cpu")
PROMPT = [5, 17, 200, 3, 88, 41, 7, 7, 120, 33, 2]


@pytest.fixture(scope="module")
def make_runner(tiny_folder):
    spec = read_model_spec(tiny_folder)
    weights = load_weights(spec, tiny_folder, WeightForm(torch.float32), CPU, lambda *_: None)
    model = resolve_model_class(spec)(spec, weights, spec.max_position_embeddings, CPU)
    shape = (40, spec.num_key_value_heads, 8, spec.head_dim)

    def make():
        runner = ModelRunner(model, max_num_seqs=4, block_size=8, device=CPU)
        runner.kv_caches = [
            KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_hidden_layers)
        ]
        return runner

    return make


@pytest.fixture(scope="module")
def expected(tiny_folder):
    reference = LlamaForCausalLM.from_pretrained(tiny_folder).eval()
    with torch.inference_mode():
        return reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def _run(runner, drive, chunks, params, beside=()):
    """Compute a prompt in chunks, beside others that decode; return its entries by chunk."""
    new = [drive.new_request(2, PROMPT, [3, 1], params)]
    new += [drive.new_request(slot, [9], [10 + slot]) for slot in beside]
    start, found = 0, []
    for index, count in enumerate(chunks):
        rows = [(slot, 1, index) for slot in beside]
        runner.execute_model(drive.step([*rows, (2, count, start)], new=new, step_id=index + 1))
        output = runner.sample_tokens(None)
        assert set(output.prompt_logprobs) <= {len(beside)}
        found.append(output.prompt_logprobs.get(len(beside), []))
        start, new = start + count, []
    return found


@pytest.mark.parametrize(
    ("chunks", "rows"), [([11], 32), ([11], 3), ([4, 4, 3], 32), ([1, 9, 1], 2), ([10, 1], 32)]
)
def test_a_prompt_in_chunks_and_few_rows(make_runner, drive, expected, monkeypatch, chunks, rows):
    monkeypatch.setattr(token_logprobs, "PROMPT_ROWS", rows)
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    found = _run(make_runner(), drive, chunks, params, beside=(0, 1))
    # The last token of the prompt has no successor in it.
    assert [len(entries) for entries in found] == [*chunks[:-1], chunks[-1] - 1]
    entries = [entry for chunk in found for entry in chunk]
    for position, entry in enumerate(entries):
        following, row = PROMPT[position + 1], expected[position]
        assert entry.token_ids == [following, *row.topk(2).indices.tolist()]
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-4)
        assert entry.rank == int((row > row[following]).sum()) + 1


def test_no_more_rows_of_logits_than_a_few(make_runner, drive, monkeypatch):
    """Case X09: the logits of a whole prompt took prompt times vocabulary."""
    runner, sizes = make_runner(), []
    compute_logits = runner._model.compute_logits

    def count(hidden):
        sizes.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(runner._model, "compute_logits", count)
    monkeypatch.setattr(token_logprobs, "PROMPT_ROWS", 4)
    _run(runner, drive, [11], SamplingParams(temperature=0, prompt_logprobs=20))
    assert sizes == [4, 4, 2, 1]


def test_a_request_that_comes_back_with_tokens_is_not_reported_on_again(make_runner, drive):
    runner = make_runner()
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    new = drive.new_request(1, [*PROMPT, 4], [0, 1], params, num_prompt_tokens=len(PROMPT))
    runner.execute_model(drive.step([(1, 12, 0)], new=[new]))
    assert runner.sample_tokens(None).prompt_logprobs == {}
