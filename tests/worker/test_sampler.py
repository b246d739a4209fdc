"""What the sampler makes of a request's parameters."""

import math

import numpy as np
import pytest
import torch

from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import GrammarOutput
from octavo_worker.input_batch import InputBatch
from octavo_worker.sampler import sample_rows
from octavo_worker.token_logprobs import MIN_LOGPROB

VOCAB = 70


def _batch(drive, *params, num_tokens=3, num_prompt_tokens=3):
    batch = InputBatch(max_num_seqs=len(params) + 2, block_size=16)
    new = [
        drive.new_request(
            index + 1, [0] * num_tokens, [0], value, num_prompt_tokens=num_prompt_tokens
        )
        for index, value in enumerate(params)
    ]
    batch.apply(drive.step([], new=new))
    return batch, np.arange(1, len(params) + 1)


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_take_the_likeliest_token(drive, temperature):
    """Case S01: temperatures between 1e-5 and 1e-4 once overflowed."""
    logits = torch.randn(20, VOCAB) * 3
    logits[torch.arange(20), torch.arange(20)] = logits.max(dim=-1).values + 1e-3
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(20)]
    batch, slots = _batch(drive, *params)
    token_ids, _ = sample_rows(logits, batch, slots)
    assert token_ids.tolist() == list(range(20))


def test_min_tokens_forbids_every_end_until_then(drive):
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(
        temperature=0,
        min_tokens=2,
        eos_token_ids=(5, 999),
        stop_token_ids=(6,),
        ignore_eos=True,
        logprobs=0,
    )
    found = []
    for num_output_tokens in range(4):
        batch, slots = _batch(drive, params, num_tokens=3 + num_output_tokens)
        found.append(sample_rows(logits, batch, slots)[0].item())
    assert found == [7, 7, 5, 5]
    assert logits[0, 5] == 9  # what is reported as raw stays raw


def test_logprobs_for_the_rows_that_asked(drive):
    logits = torch.randn(4, VOCAB)
    logits[3] = -math.inf
    logits[3, 9] = 0
    wanted = [None, 0, 3, 2]
    params = [SamplingParams(temperature=0, logprobs=count) for count in wanted]
    batch, slots = _batch(drive, *params)
    token_ids, logprobs = sample_rows(logits, batch, slots)
    assert sorted(logprobs) == [1, 2, 3]
    expected = logits.double().log_softmax(-1)
    for row in (1, 2):
        entry = logprobs[row]
        best = expected[row].topk(wanted[row]).indices.tolist()
        assert entry.token_ids == [token_ids[row], *best]
        assert entry.logprobs == pytest.approx(expected[row, entry.token_ids].tolist(), abs=1e-5)
        assert entry.rank == 1
    assert logprobs[3].logprobs == [0, 0, MIN_LOGPROB]


def test_logprobs_are_raw_whatever_is_filtered(drive):
    logits = torch.randn(1, VOCAB)
    best = int(logits.argmax())
    params = SamplingParams(
        temperature=2.0, top_k=3, min_tokens=1, stop_token_ids=(best,), logprobs=1, seed=1
    )
    batch, slots = _batch(drive, params)
    token_ids, logprobs = sample_rows(logits, batch, slots)
    assert token_ids[0] != best
    entry = logprobs[0]
    assert entry.token_ids == [token_ids[0], best]
    raw = logits.log_softmax(-1)[0]
    assert entry.logprobs == pytest.approx(raw[entry.token_ids].tolist(), abs=1e-6)
    assert entry.rank == int((raw > raw[token_ids[0]]).sum()) + 1 > 1


def test_logprobs_of_named_tokens(drive):
    logits = torch.randn(3, VOCAB)
    named = (7, 3, 7)
    params = [
        SamplingParams(temperature=0, logprob_token_ids=named),
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(temperature=0),
    ]
    batch, slots = _batch(drive, *params)
    token_ids, logprobs = sample_rows(logits, batch, slots)
    assert sorted(logprobs) == [0, 1]
    entry, expected = logprobs[0], logits[0].double().log_softmax(-1)
    assert entry.token_ids == [token_ids[0], *named]
    assert entry.logprobs == pytest.approx(expected[entry.token_ids].tolist(), abs=1e-5)
    assert logprobs[1].token_ids == [token_ids[1]] * 2
    batch.apply(drive.step([], freed=[1], new=[drive.new_request(1, [1], [0], params[1])]))
    assert len(sample_rows(logits, batch, slots)[1][0].token_ids) == 2


def test_a_grammar_constrains_its_slots_only(drive):
    logits = torch.zeros(3, VOCAB)
    logits[:, 1] = 5
    batch, slots = _batch(drive, *[SamplingParams(temperature=0)] * 3)
    words = np.zeros((2, 3), np.int32)  # 96 bits for 70 tokens
    words[0, 2] = 1 << 4  # token 68, for slot 2
    words[1] = -1  # anything, for a slot that does not sample now
    grammar = GrammarOutput(slots=[2, 4], bitmask=words.astype("<i4").tobytes())
    assert sample_rows(logits, batch, slots, grammar)[0].tolist() == [1, 68, 1]


def test_a_seed_gives_the_same_token_in_any_slot_and_another_at_another_position(drive):
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(seed=11)
    alone, slots = _batch(drive, params)
    token = sample_rows(logits, alone, slots)[0].item()
    crowd, slots = _batch(drive, SamplingParams(), SamplingParams(temperature=0), params)
    assert sample_rows(logits.expand(3, -1), crowd, slots)[0][2] == token
    tokens = set()
    for num_tokens in range(3, 13):
        batch, slots = _batch(drive, params, num_tokens=num_tokens)
        tokens.add(sample_rows(logits, batch, slots)[0].item())
    assert len(tokens) > 4
