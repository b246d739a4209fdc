"""Rules on single logits: each alone, together, and whatever runs in the other rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.sampling_params import SamplingParams
from octavo_kernels import TokenEntries, mask_logits
from octavo_kernels.apply_penalties import apply_penalties_reference
from octavo_worker.input_batch import InputBatch
from octavo_worker.sampler import sample_rows

VOCAB = 70
PROMPT = [11, 12, 11]


def greedy(**values):
    return SamplingParams(temperature=0.0, **values)


def make_batch(drive, rows, num_slots=None):
    """Put (output so far, parameters) into slots 0, 1, …; None leaves a slot empty."""
    batch = InputBatch(max_num_seqs=num_slots or len(rows), block_size=16)
    new = [
        drive.new_request(slot, PROMPT + row[0], [0], row[1], num_prompt_tokens=len(PROMPT))
        for slot, row in enumerate(rows)
        if row is not None
    ]
    batch.apply(drive.step([], new=new))
    slots = np.array([slot for slot, row in enumerate(rows) if row is not None])
    return batch, slots


def changed(drive, params, output=()):
    """Logits of one row after its rules; all were 1 before."""
    batch, slots = make_batch(drive, [(list(output), params)])
    logits = torch.ones(1, VOCAB)
    batch.rules.apply(logits, batch, slots)
    return logits[0]


def forbidden(logits):
    return np.flatnonzero(np.isneginf(logits.numpy())).tolist()


def test_a_batch_without_rules_has_nothing_to_do(drive):
    rows = [([1], greedy(min_tokens=1, stop_token_ids=(3,))), ([1], SamplingParams(top_k=3))]
    batch, slots = make_batch(drive, rows)
    assert not batch.rules.would_change(batch, slots)


def test_only_allowed_tokens_are_left(drive):
    allowed = (3, 40, 69, 3)
    logits = changed(drive, greedy(allowed_token_ids=allowed))
    assert sorted(set(range(VOCAB)) - set(forbidden(logits))) == [3, 40, 69]
    assert forbidden(changed(drive, greedy(allowed_token_ids=(0,)))) == list(range(1, VOCAB))


def test_a_bias_is_added(drive):
    logits = changed(drive, greedy(logit_bias={5: 2.5, 6: -100}))
    assert logits[[4, 5, 6]].tolist() == [1, 3.5, -99]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [9]),
        ([1], [2, 9]),  # what is forbidden ends the words (1, 2), (1, 2, 3) and (9,)
        ([1, 2], [3, 9]),
        ([5, 1, 2], [3, 9]),
        ([2], [9]),
        ([1, 2, 2], [9]),
    ],
)
def test_bad_words_end_where_their_beginning_is_there(drive, output, expected):
    words = ((1, 2), (1, 2, 3), (9,))
    assert forbidden(changed(drive, greedy(bad_words_token_ids=words), output)) == expected


def test_bad_words_begin_in_the_answer_and_not_in_the_prompt(drive):
    assert forbidden(changed(drive, greedy(bad_words_token_ids=((11, 5),)))) == []


def test_bad_words_give_way_where_nothing_would_be_left(drive):
    params = greedy(allowed_token_ids=(4, 5), bad_words_token_ids=((4, 4), (4, 5)))
    assert 4 not in forbidden(changed(drive, params, [4]))
    assert forbidden(changed(drive, params, [5])) == forbidden(
        changed(drive, greedy(allowed_token_ids=(4, 5)))
    )


def test_no_end_before_min_tokens_whatever_its_bias(drive):
    """Case S13: every end token of a list, and the stop tokens, are held off."""
    params = greedy(min_tokens=2, eos_token_ids=(5, 6), stop_token_ids=(7,), logit_bias={6: 100.0})
    assert forbidden(changed(drive, params, [1])) == [5, 6, 7]
    late = changed(drive, params, [1, 1])
    assert forbidden(late) == []
    assert late[6] == 101


def test_presence_and_frequency_look_at_the_answer_alone(drive):
    """Case S09: words of the prompt were punished, or repetition missed them at first."""
    params = greedy(presence_penalty=0.5, frequency_penalty=0.25)
    assert changed(drive, params).tolist() == [1.0] * VOCAB
    logits = changed(drive, params, [20, 20, 12])
    assert logits[[20, 12, 11]].tolist() == [1 - 0.5 - 2 * 0.25, 1 - 0.5 - 0.25, 1]
    logits = changed(drive, greedy(repetition_penalty=2.0), [20])
    assert logits[[11, 12, 20, 0]].tolist() == [0.5, 0.5, 0.5, 1]


def test_penalties_come_after_the_bias(drive):
    logits = changed(drive, greedy(repetition_penalty=2.0, logit_bias={11: -3.0}))
    assert logits[11] == -4  # a negative logit is multiplied


def test_a_request_that_comes_back_after_a_preemption_finds_the_same_rules(drive):
    params = SamplingParams(
        seed=5,
        frequency_penalty=1.0,
        presence_penalty=-0.5,
        repetition_penalty=1.3,
        bad_words_token_ids=((20, 21),),
        min_tokens=9,
        stop_token_ids=(3,),
        logit_bias={8: 2.0},
    )
    base = torch.randn(12, VOCAB) * 2

    def run(preempt_after):
        batch, slots = make_batch(drive, [None, ([], params)], num_slots=3)
        output = []
        for index in range(len(base)):
            if index == preempt_after:
                tokens = [*PROMPT, *output]
                new = drive.new_request(2, tokens, [0], params, num_prompt_tokens=len(PROMPT))
                batch.apply(drive.step([], freed=[1], new=[new]))
                slots = np.array([2])
            token_ids, _ = sample_rows(base[index : index + 1].clone(), batch, slots)
            batch.append_tokens(slots, token_ids)
            output.append(int(token_ids[0]))
        return output

    undisturbed = run(None)
    assert all(run(index) == undisturbed for index in (1, 6, 11))


def test_a_slot_forgets_the_rules_of_its_last_request(drive):
    params = greedy(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias={1: 1.0},
        allowed_token_ids=(2,),
        bad_words_token_ids=((3,), (4, 5)),
        min_tokens=5,
        stop_token_ids=(6,),
    )
    batch, slots = make_batch(drive, [([], params)])
    logits = torch.ones(1, VOCAB)
    batch.rules.apply(logits, batch, slots)
    batch.apply(drive.step([], freed=[0], new=[drive.new_request(0, [1], [0])]))
    assert not batch.rules.would_change(batch, slots)
    again = torch.ones(1, VOCAB)
    batch.rules.apply(again, batch, slots)
    assert again.tolist() == [[1.0] * VOCAB]


# Rows do not affect each other

_IDS = st.integers(0, VOCAB - 1)
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 9),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.5]),
    logit_bias=st.none() | st.dictionaries(_IDS, st.sampled_from([-100.0, 3.0]), max_size=4),
    allowed_token_ids=st.none() | st.lists(_IDS, min_size=3, max_size=9).map(tuple),
    bad_words_token_ids=st.lists(
        st.lists(st.integers(20, 26), min_size=1, max_size=3).map(tuple), max_size=5
    ).map(tuple),
    min_tokens=st.sampled_from([0, 3]),
    eos_token_ids=st.just((1, 2)),
    logprobs=st.sampled_from([None, 0, 3]),
)
_ROW = st.tuples(st.lists(st.integers(20, 26), max_size=5), _PARAMS)


@settings(max_examples=60, deadline=None)
@given(st.lists(_ROW, min_size=2, max_size=6), st.integers(0, 99))
def test_a_row_gets_the_same_token_alone_and_beside_any_others(drive, rows, seed):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    batch, slots = make_batch(drive, rows)
    together, logprobs = sample_rows(logits.clone(), batch, slots)
    for index, row in enumerate(rows):
        alone, slot = make_batch(drive, [None] * index + [row])
        token_id, logprob = sample_rows(logits[index : index + 1].clone(), alone, slot)
        assert token_id[0] == together[index]
        assert logprob.get(0) == logprobs.get(index)


@settings(max_examples=40, deadline=None)
@given(_ROW, st.integers(0, 99))
def test_rules_are_those_of_a_plain_reading(drive, row, seed):
    """Against a twin that goes by the words of the definition, one rule after the other."""
    output, params = row
    before = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    batch, slots = make_batch(drive, [row])
    logits = before.clone()
    batch.rules.apply(logits, batch, slots)

    banned = {
        word[-1]
        for word in params.bad_words_token_ids
        if len(word) == 1 or tuple(output[-(len(word) - 1) :]) == word[:-1]
    }
    if len(output) < params.min_tokens:
        banned |= {*params.eos_token_ids}
    if params.allowed_token_ids is not None:
        if set(params.allowed_token_ids) <= banned:
            return  # no token is left, which has a test of its own
        banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
    expected = before.clone()
    ids = torch.tensor(sorted(banned), dtype=torch.int64)
    mask_logits(expected, forbidden=TokenEntries(torch.zeros_like(ids), ids))
    for token_id, bias in (params.logit_bias or {}).items():
        expected[0, token_id] += bias
    tokens = PROMPT + output
    apply_penalties_reference(
        expected,
        torch.tensor([tokens], dtype=torch.int32),
        torch.tensor([len(PROMPT)]),
        torch.tensor([len(tokens)]),
        torch.tensor([params.repetition_penalty]),
        torch.tensor([params.frequency_penalty]),
        torch.tensor([params.presence_penalty]),
    )
    assert not math.isnan(float(logits.sum()))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
