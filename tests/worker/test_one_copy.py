"""A step's way to a GPU, with a device that is pretended: one copy, from pinned memory."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.sampling_params import SamplingParams
from octavo_worker.model_runner import ModelRunner

GROUPS = (KVCacheGroup((0,)), KVCacheGroup((1,), window=8))


class NextToken:
    """Stands for a model: its hidden state is the token id, its logits favour the next id."""

    def forward(self, input_ids, positions, kv_caches, metadata):
        return input_ids.unsqueeze(-1).double()

    def compute_logits(self, hidden):
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % 50, 50).float()


class Gpu:
    """Takes copies to a CUDA device, which stay where they are, and counts all host tensors."""

    def __init__(self, monkeypatch):
        self.pinned, self.copies, self.num_host_tensors = [], [], 0
        self._to, self._from_numpy, self._tensor = torch.Tensor.to, torch.from_numpy, torch.tensor
        gpu = self

        def pin_memory(tensor):
            gpu.pinned.append(tensor.clone())
            return gpu.pinned[-1]

        def to(tensor, *arguments, **options):
            if not arguments or torch.device("cuda") != arguments[0]:
                return gpu._to(tensor, *arguments, **options)
            gpu.copies.append((any(tensor is other for other in gpu.pinned), options))
            return tensor.clone()

        def counted(make):
            def count(*arguments, **options):
                gpu.num_host_tensors += 1
                return make(*arguments, **options)

            return count

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch, "from_numpy", counted(torch.from_numpy))
        monkeypatch.setattr(torch, "tensor", counted(torch.tensor))


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.fixture
def sampled(monkeypatch):
    """What the sampler was given, step by step; it takes the likeliest tokens."""
    calls = []

    def sample(logits, metadata):
        calls.append(metadata)
        return logits.argmax(-1)

    monkeypatch.setattr("octavo_worker.sampler.sample", sample)
    return calls


def _runner(device):
    options = {"max_num_seqs": 4, "block_size": 4, "device": torch.device(device)}
    return ModelRunner(NextToken(), groups=GROUPS, **options)


def _request(drive, slot, token_ids, first_block, **params):
    made = drive.new_request(slot, token_ids, [], SamplingParams(max_tokens=None, **params))
    made.block_tables[:] = [[first_block, first_block + 1, first_block + 2], [30, 31, 32]]
    return made


def _steps(drive):
    """A piece of a prompt beside whole ones, then its rest beside decodes, then decodes alone."""
    new = [
        _request(drive, 3, list(range(10, 20)), 5, temperature=0),
        _request(drive, 1, [30, 31], 9, temperature=0.7, seed=-5, top_k=3),
        _request(drive, 0, [40], 13, temperature=1.5, seed=2**40 + 1, top_p=0.9, min_p=0.1),
    ]
    yield drive.step([(3, 6, 0), (1, 2, 0), (0, 1, 0)], new=new)
    yield drive.step([(1, 1, 2), (3, 4, 6), (0, 1, 1)], step_id=2)
    yield drive.step([(1, 1, 3), (3, 1, 10), (0, 1, 2)], step_id=3)


def test_a_step_is_one_copy_from_pinned_memory(drive, gpu, sampled):
    runner = _runner("cuda")
    outputs = []
    for step in _steps(drive):
        gpu.copies.clear()
        gpu.num_host_tensors = 0
        runner.execute_model(step)
        outputs.append(runner.sample_tokens(None).sampled_token_ids)
        assert gpu.copies == [(True, {"non_blocking": True})]
        assert gpu.num_host_tensors == 1  # another one would be another copy
    assert outputs == [[-1, 32, 41], [33, 20, 42], [34, 21, 43]]


def test_what_arrives_is_what_a_cpu_reads(drive, gpu, sampled):
    runners = _runner("cuda"), _runner("cpu")
    for step in _steps(drive):
        for runner in runners:
            runner.execute_model(step)
        on_gpu, on_cpu = (runner.prepare_input(step) for runner in runners)
        for name in ("input_ids", "positions", "last_tokens"):
            assert torch.equal(getattr(on_gpu, name), getattr(on_cpu, name)), name
        for one, other in zip(on_gpu.metadata, on_cpu.metadata, strict=True):
            for field in fields(one):
                found, expected = getattr(one, field.name), getattr(other, field.name)
                if isinstance(found, torch.Tensor):
                    assert torch.equal(found, expected), field.name
                else:
                    assert found == expected, field.name
        for runner in runners:
            runner.sample_tokens(None)


def test_the_sampler_finds_its_parameters_there(drive, gpu, sampled):
    runner = _runner("cuda")
    for step in _steps(drive):
        runner.execute_model(step)
        runner.sample_tokens(None)
    assert [len(metadata.positions) for metadata in sampled] == [2, 3, 3]
    for metadata in sampled:
        assert metadata.on_device.dtype == torch.int64
        assert np.array_equal(metadata.on_device.numpy(), metadata.packed())
    assert sampled[0].on_device[4:].tolist() == [[-5, 2**40 + 1], [2, 1]]  # seeds, positions
