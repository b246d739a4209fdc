"""Steps as one call: the runner takes it where it can, and answers as it does without it."""

import numpy as np
import pytest
import torch

from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_core.scheduler_output import GrammarOutput
from octavo_core.structured_outputs import StructuredOutputsParams
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.model_runner import ModelRunner
from octavo_worker.models import KVCache, resolve_model_class
from support import tiny_families
from support.tiny_families import save_family

CPU = torch.device("cpu")
FITTING = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
VOCAB_SIZES = 300, tiny_families.VOCAB_SIZE


def _load(path):
    spec = read_model_spec(path)
    weights = load_weights(spec, path, WeightForm(torch.float32, "q8_0"), CPU, lambda *_: None)
    return resolve_model_class(spec)(spec, weights, 256, CPU), spec


@pytest.fixture(scope="module")
def model(make_llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("one-call")
    make_llama(**FITTING).save_pretrained(path)
    return _load(path)[0]


def _runner(model, *, one_call=True, groups=(), num_layers=2, head_dim=16):
    runner = ModelRunner(model, max_num_seqs=4, block_size=16, device=CPU, groups=groups)
    shape = (40, 2, 16, head_dim)
    runner.kv_caches = [KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(num_layers)]
    if not one_call:
        runner._step_of_caches = lambda: None
    return runner


def _run(runner, step, grammar=None):
    runner.execute_model(step)
    return runner.sample_tokens(grammar)


def _assert_same_answers(model, steps, **options):
    ours, theirs = _runner(model, **options), _runner(model, one_call=False, **options)
    assert ours._step_of_caches() is not None
    found = [_run(ours, step) for step in steps]
    assert found == [_run(theirs, step) for step in steps]
    return found


def _story(drive, params, vocab_size=VOCAB_SIZES[0]):
    """Two prompts, one of them in pieces, that decode; the second slot is another's later on."""
    prompt = [(7 * i) % vocab_size for i in range(40)]
    new = [
        drive.new_request(2, prompt, [5, 3, 9], params[0]),
        drive.new_request(0, [4, 4, 125], [7], params[1]),
    ]
    following = [drive.new_request(0, prompt[:20], [8, 2], params[2])]
    return [
        drive.step([(2, 30, 0), (0, 3, 0)], new=new, step_id=1),
        drive.step([(0, 1, 3), (2, 10, 30)], step_id=2),
        drive.step([(0, 1, 4), (2, 1, 40)], step_id=3),
        drive.step([(2, 1, 41)], freed=[0], step_id=4),
        drive.step([(2, 1, 42), (0, 20, 0)], new=following, blocks=[(2, [1])], step_id=5),
        drive.step([(2, 1, 43), (0, 1, 20)], step_id=6),
        drive.step([], freed=[0, 2], step_id=7),
    ]


def test_greedy_and_random_tokens_are_those_of_the_operations(model, drive):
    random = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=4)
    found = _assert_same_answers(model, _story(drive, [drive.greedy, random, drive.greedy]))
    assert [len(output.sampled_token_ids) for output in found] == [2, 2, 2, 1, 2, 2, 0]
    assert found[0].sampled_token_ids[0] == -1  # its prompt is not complete


def test_rules_and_reports_beside_plain_rows(model, drive):
    params = [
        SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=9, min_p=0.05),
    ]
    found = _assert_same_answers(model, _story(drive, params))
    assert list(found[0].logprobs) == [1]
    assert found[0].prompt_logprobs.keys() == {1}


def test_an_own_request_for_nothing_but_tokens_needs_no_logits(model, drive):
    runner = _runner(model)
    plain = drive.new_request(1, [1, 2], [3], SamplingParams(temperature=0.5, top_k=3, seed=1))
    _run(runner, drive.step([(1, 2, 0)], new=[plain]))
    assert not runner.batch.needs_logits([1])
    for wants in (
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 0.1},
        {"min_tokens": 2, "stop_token_ids": (5,)},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ):
        request = drive.new_request(1, [1, 2], [3], SamplingParams(**wants))
        _run(runner, drive.step([(1, 2, 0)], new=[request], step_id=2))
        assert runner.batch.needs_logits([0, 1]), wants
    _run(runner, drive.step([], freed=[1], step_id=3))
    assert not runner.batch.needs_logits([0, 1])


def test_a_grammar_decides_what_one_call_has_computed(model, drive):
    params = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputsParams(regex="a+"))
    runner = _runner(model)
    mask = np.zeros(10, np.int32)
    mask[7] = 1 << 3
    step = drive.step([(1, 3, 0)], new=[drive.new_request(1, [1, 2, 3], [3], params)])
    output = _run(runner, step, GrammarOutput([1], mask.tobytes()))
    assert output.sampled_token_ids == [7 * 32 + 3]
    assert runner.batch.token_ids[1, :4].tolist() == [1, 2, 3, 227]


def test_a_token_that_is_not_known_fails_the_step_and_leaves_the_batch(model, drive):
    runner = _runner(model)
    step = drive.step([(1, 4, 0)], new=[drive.new_request(1, [1, 2, 3], [3])])
    runner.execute_model(step)
    with pytest.raises(RuntimeError, match="slot 1 is scheduled up to token 4, but has 3"):
        runner.sample_tokens(None)
    assert runner.batch.num_tokens[1] == 3


def test_an_answer_may_outgrow_the_tables(model, drive):
    """The token table starts at 1,024 columns; the kernel follows it when it is widened."""
    prompt = [(3 * i) % VOCAB_SIZES[0] for i in range(250)]
    runners = _runner(model), _runner(model, one_call=False)
    for runner in runners:
        runner.batch.token_ids = runner.batch.token_ids[:, :251].copy()
        runner.batch.block_tables = [runner.batch.block_tables[0][:, :16].copy()]
    new = [drive.new_request(0, prompt, list(range(1, 17)))]
    steps = [drive.step([(0, 250, 0)], new=new)] + [
        drive.step([(0, 1, 250 + i)], step_id=2 + i) for i in range(5)
    ]
    ours, theirs = ([_run(runner, step) for step in steps] for runner in runners)
    assert ours == theirs
    assert runners[0].batch.token_ids.shape[1] > 251


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen2 window",
        "qwen3",
        "mistral window",
        "phi3",
        "phi4",
        "gemma",
        "gemma2",
        "gemma3",
    ],
)
def test_families_whose_steps_are_one_call(family, drive, tmp_path):
    """Their layers one by one give the same hidden states, and so the same tokens."""
    # Three quarters of a head of 64 are rotated there.
    head_dim = 64 if family == "phi4" else 16
    save_family(family, tmp_path, **FITTING, head_dim=head_dim)
    (ours, spec), (theirs, _) = _load(tmp_path), _load(tmp_path)
    theirs._decoder = None
    groups = spec.kv_cache_groups()
    options = {"groups": groups, "num_layers": spec.num_hidden_layers, "head_dim": head_dim}
    runners = _runner(ours, **options), _runner(theirs, **options)
    assert runners[0]._step_of_caches() is not None
    assert runners[1]._step_of_caches() is None
    random = SamplingParams(temperature=0.9, top_p=0.95, seed=4)
    for step in _story(drive, [drive.greedy, random, drive.greedy], VOCAB_SIZES[1]):
        for request in step.new_requests:
            request.block_tables[:] = [
                [block + 10 * group for block in request.block_tables[0]]
                for group in range(len(groups))
            ]
        for _, added in step.new_block_ids:
            added[:] = [[block + 10 * group for block in added[0]] for group in range(len(groups))]
        assert _run(runners[0], step) == _run(runners[1], step)
    for cache, other in zip(runners[0].kv_caches, runners[1].kv_caches, strict=True):
        assert torch.equal(cache.key, other.key)
        assert torch.equal(cache.value, other.value)
