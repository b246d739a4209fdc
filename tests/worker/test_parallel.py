"""Several workers compute what one computes."""

import psutil
import pytest

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
    ("sizes", "form"),
    [((2, 1), "auto"), ((1, 2), "none"), ((2, 2), "auto")],
    ids=["TP2", "PP2", "TP2 x PP2"],
)
def test_same_tokens_as_one_worker(make_config, tiny_folder, expected, sizes, form):
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
        workers = [
            child
            for child in psutil.Process().children()
            if "".join(child.cmdline()).startswith("octavo: worker")
        ]
        assert len(workers) >= sizes[0] * sizes[1]
        listening = [
            connection.laddr.ip
            for worker in workers
            for connection in worker.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) <= {"127.0.0.1", "::1"}
    finally:
        engine.shutdown()
