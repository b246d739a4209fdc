"""The persistent batch and the flat input that the runner makes of it."""

import msgspec
import numpy as np
import pytest
import torch

from octavo_core.sampling_params import SamplingParams
from octavo_worker.input_batch import InputBatch
from octavo_worker.model_runner import ModelRunner


class _Recorder:
    """Stands for a model: its hidden state is the token id, its logits favour the next id."""

    def __init__(self):
        self.fail = False

    def forward(self, input_ids, positions, kv_caches, metadata):
        if self.fail:
            raise RuntimeError("no luck")
        return input_ids.unsqueeze(-1).float()

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % 50, 50).float()


def _runner(block_size=4, max_num_seqs=4):
    model = _Recorder()
    runner = ModelRunner(
        model, max_num_seqs=max_num_seqs, block_size=block_size, device=torch.device("cpu")
    )
    return runner, model


def test_a_story_of_two_requests(drive):
    runner, _ = _runner()
    long, short = list(range(10, 20)), [30, 31]

    # The long one gets six tokens, and is not finished: nothing is sampled for it.
    new = [drive.new_request(3, long, [5, 2]), drive.new_request(1, short, [7])]
    runner.execute_model(drive.step([(3, 6, 0), (1, 2, 0)], new=new))
    output = runner.sample_tokens(None)
    assert (output.step_id, output.sampled_token_ids) == (1, [-1, 32])

    # The rest of the long one, while the short one decodes what was sampled.
    following = drive.step([(1, 1, 2), (3, 4, 6)], blocks=[(3, [0])], step_id=2)
    runner.execute_model(following)
    flat = runner.prepare_input(following)
    assert flat.input_ids.tolist() == [32, 16, 17, 18, 19]
    assert flat.positions.tolist() == [2, 6, 7, 8, 9]
    (metadata,) = flat.metadata
    assert metadata.query_start_loc.tolist() == metadata.host_query_start_loc == [0, 1, 5]
    assert metadata.seq_lens.tolist() == metadata.host_seq_lens == [3, 10]
    assert metadata.slot_mapping.tolist() == [30, 2 * 4 + 2, 2 * 4 + 3, 0, 1]
    assert metadata.block_tables[0, 0] == 7
    assert metadata.block_tables[1].tolist() == [5, 2, 0]
    assert runner.sample_tokens(None).sampled_token_ids == [33, 20]

    # The short one ends, and another takes its slot, resumed with an answer of its own.
    resumed = drive.new_request(1, [40, 41, 42], [7], computed=2, num_prompt_tokens=1)
    runner.execute_model(drive.step([(3, 1, 10), (1, 1, 2)], freed=[1], new=[resumed], step_id=3))
    assert runner.sample_tokens(None).sampled_token_ids == [21, 43]
    assert runner.batch.token_ids[1, :4].tolist() == [40, 41, 42, 43]
    assert runner.batch.num_tokens.tolist() == [0, 4, 0, 12]


def test_a_failed_step_appends_nothing_and_can_be_repeated(drive):
    runner, model = _runner()
    new = [drive.new_request(0, [1, 2, 3], [0])]
    model.fail = True
    runner.execute_model(drive.step([(0, 3, 0)], new=new))
    with pytest.raises(RuntimeError, match="no luck"):
        runner.sample_tokens(None)
    assert runner.batch.num_tokens[0] == 3
    model.fail = False
    runner.execute_model(drive.step([(0, 3, 0)], step_id=2))
    assert runner.sample_tokens(None).sampled_token_ids == [4]


def test_a_step_without_tokens(drive):
    runner, _ = _runner()
    runner.execute_model(drive.step([], step_id=9))
    assert runner.sample_tokens(None).step_id == 9


@pytest.mark.parametrize("scheduled", [(0, 4, 0), (0, 1, 3), (0, 1, 9), (2, 1, 0)])
def test_tokens_and_blocks_that_a_slot_does_not_have(drive, scheduled):
    runner, _ = _runner()
    new = [drive.new_request(0, [1, 2, 3], [0])]
    runner.execute_model(drive.step([scheduled], new=new))
    with pytest.raises(RuntimeError, match=f"slot {scheduled[0]} is scheduled up to"):
        runner.sample_tokens(None)


def test_tables_widen_and_keep_what_they_hold(drive):
    batch = InputBatch(max_num_seqs=3, block_size=16)
    first, long = list(range(1024)), list(range(3000))
    batch.apply(drive.step([], new=[drive.new_request(1, first, list(range(64)))]))
    batch.append_tokens(np.array([1]), np.array([77]))
    batch.apply(drive.step([], new=[drive.new_request(2, long, list(range(500)))]))
    batch.apply(drive.step([], blocks=[(1, [64, 99])]))
    assert batch.token_ids[1, : batch.num_tokens[1]].tolist() == [*first, 77]
    assert batch.token_ids[2, : batch.num_tokens[2]].tolist() == long
    assert batch.block_tables[0][1, : batch.num_blocks[1]].tolist() == [*range(65), 99]
    assert batch.block_tables[0][2, : batch.num_blocks[2]].tolist() == list(range(500))


def test_parameters_of_a_slot_are_replaced(drive):
    batch = InputBatch(max_num_seqs=1, block_size=16)
    params = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=-5)
    batch.apply(drive.step([], new=[drive.new_request(0, [1], [0], params)]))
    assert (batch.temperature[0], batch.top_k[0], batch.seeds[0]) == (0.5, 0, -5)
    batch.apply(drive.step([], freed=[0], new=[drive.new_request(0, [2], [0])]))
    assert (batch.temperature[0], batch.top_p[0], batch.min_p[0]) == (0, 1, 0)


def test_unseeded_requests_differ(drive):
    batch = InputBatch(max_num_seqs=2, block_size=16)
    params = SamplingParams()
    new = [drive.new_request(slot, [1], [0], params) for slot in (0, 1)]
    batch.apply(drive.step([], new=new))
    assert batch.seeds[0] != batch.seeds[1]


def test_forced_tokens_are_appended_before_the_step(drive):
    """What a grammar leaves no choice about is computed in one step with the token before it."""
    runner, _ = _runner()
    runner.execute_model(drive.step([(1, 2, 0)], new=[drive.new_request(1, [5, 6], [3, 4])]))
    assert runner.sample_tokens(None).sampled_token_ids == [7]
    following = msgspec.structs.replace(
        drive.step([(1, 3, 2)], step_id=2), forced_tokens=[(1, [20, 30])]
    )
    runner.execute_model(following)
    assert runner.prepare_input(following).input_ids.tolist() == [7, 20, 30]
    assert runner.sample_tokens(None).sampled_token_ids == [31]
    assert runner.batch.token_ids[1, :6].tolist() == [5, 6, 7, 20, 30, 31]
