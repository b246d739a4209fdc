"""Captured decode steps, with graphs that call what they recorded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from octavo_core.config import resolve_config
from octavo_worker.graph_capture import GraphedModel, capture_sizes, captures_graphs
from support import engine_texts
from support.tiny_families import save_family

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Recorder:
    """Makes graphs that call a function again, into the memory that its first result had."""

    def __init__(self):
        self.replays = []

    def capture(self, run):
        output = run()
        recorder, size = self, len(output)

        class Graph:
            def replay(self):
                recorder.replays.append(size)
                output.copy_(run())

        return Graph(), output


def test_sizes():
    assert capture_sizes(1) == [1]
    assert capture_sizes(6) == [1, 2, 4, 6]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = capture_sizes(10_000)
    assert sizes[-1] == 512
    assert max(b - a for a, b in pairwise(sizes)) == 16


def test_where_graphs_are_captured(monkeypatch):
    monkeypatch.setattr("octavo_kernels.dispatch._has", lambda module: True)
    assert captures_graphs(resolve_config({}), CUDA)
    assert not captures_graphs(resolve_config({}), CPU)
    for setting in (
        {"enforce_eager": True},
        {"tensor_parallel_size": 2},
        {"cpu_offload_gb": 1},
    ):
        assert not captures_graphs(resolve_config(setting), CUDA)
    monkeypatch.setenv("OCTAVO_KERNELS", "reference")
    assert not captures_graphs(resolve_config({}), CUDA)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_answers_are_those_of_an_engine_without_graphs(family, make_config, tmp_path, monkeypatch):
    """Gemma 3 has two block tables. Prompts in pieces, preemptions and prefix hits included."""
    save_family(family, tmp_path, vocab_size=300)
    config = make_config(
        tmp_path,
        quantization="none",
        cpu_threads=1,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=128,
        num_gpu_blocks_override=20,
    )
    expected = engine_texts.generate(config)
    monkeypatch.setattr("octavo_worker.worker.captures_graphs", lambda *_: True)
    recorder = Recorder()
    monkeypatch.setattr("octavo_worker.worker.CudaGraphMaker", lambda: recorder)
    stages = []
    engine = engine_texts.start_engine(config)
    worker = engine._executor._worker
    assert isinstance(worker.runner_model, GraphedModel)
    worker.runner_model.capture(
        worker.runner.kv_caches, lambda stage, share: stages.append((stage, share))
    )
    assert stages[0] == ("capturing graphs", 0.0)
    assert len(stages) == 4
    assert all(not cache.key.any() for cache in worker.runner.kv_caches)  # nothing was written
    assert engine_texts.run(engine, engine_texts.requests()) == expected
    # Sizes between are padded to the next one.
    assert set(recorder.replays) <= {1, 2, 4, 6}
    assert len(set(recorder.replays)) >= 2


def test_rows_that_pad_leave_the_cache_alone(make_config, tiny_folder, monkeypatch, drive):
    monkeypatch.setattr("octavo_worker.worker.captures_graphs", lambda *_: True)
    monkeypatch.setattr("octavo_worker.worker.CudaGraphMaker", Recorder)
    config = make_config(
        tiny_folder, quantization="none", num_gpu_blocks_override=8, max_model_len=64
    )
    engine = engine_texts.start_engine(config)
    worker = engine._executor._worker
    before = [cache.key.clone() for cache in worker.runner.kv_caches]
    requests = [drive.new_request(slot, [5, 6, slot], [slot + 1]) for slot in range(3)]
    worker.execute_model(drive.step([(slot, 3, 0) for slot in range(3)], new=requests))
    worker.sample_tokens(None)
    worker.execute_model(drive.step([(slot, 1, 3) for slot in range(3)], step_id=2))
    worker.sample_tokens(None)
    for cache, old in zip(worker.runner.kv_caches, before, strict=True):
        changed = (cache.key != old)[:: worker.runner.batch.block_step].any(dim=(1, 3))
        changed = changed.nonzero().tolist()
        assert changed == [[block, slot] for block in (1, 2, 3) for slot in range(4)]
