"""Several workers compute what one computes."""

import os
import signal

import psutil
import pytest

from octavo_core.errors import ConfigError, EngineDeadError, EngineError
from octavo_core.model_spec import read_model_spec
from octavo_worker.executors import create_executor
from support import engine_texts

TINY = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "num_gpu_blocks_override": 8,
}


@pytest.fixture(scope="module")
def expected(make_config, tiny_folder):
    """The tokens of one worker, for each form of weights."""
    return {
        form: engine_texts.generate(make_config(tiny_folder, quantization=form, **TINY))
        for form in ("auto", "none")
    }


@pytest.mark.parametrize(
    ("sizes", "form"), [((1, 2), "none"), ((2, 2), "auto")], ids=["PP2", "TP2 x PP2"]
)
def test_same_tokens_as_one_worker(drive, make_config, tiny_folder, expected, sizes, form):
    """With prompts in pieces, preemptions and prefix hits, greedy and with seeds."""
    config = make_config(
        tiny_folder,
        quantization=form,
        tensor_parallel_size=sizes[0],
        pipeline_parallel_size=sizes[1],
        **TINY,
    )
    engine = engine_texts.start_engine(config)
    try:
        assert engine_texts.run(engine, engine_texts.requests()) == expected[form]
        assert engine.stats().num_preemptions > 0
        workers = [psutil.Process(w._process.pid) for w in engine._executor._workers]
        assert len(workers) == sizes[0] * sizes[1]
        assert _listening(workers) <= {"127.0.0.1", "::1"}
        # A step that raises everywhere leaves nobody waiting for anybody.
        engine._executor.execute_model(drive.step([(5, 5, 0)], freed=[5], step_id=1))
        with pytest.raises(EngineError, match="slot 5 is scheduled up to token 5"):
            engine._executor.sample_tokens(None).result(timeout=60)
        assert engine_texts.run(engine, engine_texts.requests()) == expected[form]
        # One worker's end is everybody's.
        os.kill(workers[-1].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine_texts.run(engine, engine_texts.requests())
    finally:
        engine.shutdown()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def _listening(workers):
    return {
        connection.laddr.ip
        for worker in workers
        for connection in worker.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_one_process_is_not_enough(make_config, tiny_folder):
    config = make_config(
        tiny_folder, distributed_executor_backend="uni", tensor_parallel_size=2, **TINY
    )
    with pytest.raises(ConfigError, match=r"uni \(from flag .*runs one worker.*use mp or ray"):
        create_executor(config, read_model_spec(tiny_folder))
