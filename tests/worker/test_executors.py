"""The two executors and the worker behind them, on real models."""

import os
import signal
import time

import msgspec
import psutil
import pytest
import torch

from octavo_core import errors
from octavo_core.errors import ConfigError, EngineDeadError, EngineError, ModelError
from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_worker.executors import create_executor, messages
from octavo_worker.executors.command_handler import CommandHandler
from octavo_worker.executors.multiproc import (
    STOP_TIMEOUT,
    TERMINATE_TIMEOUT,
    MultiprocExecutor,
)
from octavo_worker.executors.uniproc import UniProcExecutor

BACKENDS = ("uni", "mp")
PROMPT = [5, 17, 200, 3, 88, 41, 7, 7, 120]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=4, max_tokens=None)


def _start(make_config, path, num_blocks=20, **values):
    config = make_config(path, **values)
    executor = create_executor(config, read_model_spec(path))
    reports = []
    try:
        executor.load_model(lambda stage, progress: reports.append((stage, progress)))
        assert executor.determine_available_memory() == 1 << 24
        executor.initialize_kv_cache(num_blocks)
        executor.warm_up(lambda stage, progress: None)
    except BaseException:
        executor.shutdown()
        raise
    assert reports[-1] == ("loading weights", 1.0)
    return executor


def _worker_process(executor):
    return psutil.Process(executor._workers[0]._process.pid)


@pytest.fixture(scope="module")
def running(make_config, tiny_folder):
    """Both executors, on the same tiny model."""
    executors = {
        name: _start(make_config, tiny_folder, distributed_executor_backend=name)
        for name in BACKENDS
    }
    yield executors
    for executor in executors.values():
        executor.shutdown()


def test_the_configuration_chooses(running):
    assert isinstance(running["uni"], UniProcExecutor)
    assert isinstance(running["mp"], MultiprocExecutor)
    for executor in running.values():
        assert (executor.device, executor.dtype) == ("cpu", "float32")
        executor.check_health()


def test_both_give_the_tokens_that_transformers_gives(running, drive, make_llama):
    expected = make_llama().generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :]
    for executor in running.values():
        assert drive.generate(executor, PROMPT, 20) == expected.tolist()


def test_seeded_answers_are_the_same_in_both_in_any_slot_and_twice(running, drive):
    answers = [
        drive.generate(executor, PROMPT, 20, SAMPLED, slot=slot)
        for executor in running.values()
        for slot in (0, 5)
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert answers[0] != drive.generate(running["uni"], PROMPT, 20)


def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(running, drive):
    executor = running["uni"]
    whole = drive.generate(executor, PROMPT, 12, SAMPLED)
    known = [*PROMPT, *whole[:7]]
    request = drive.new_request(3, known, list(range(20)), SAMPLED, num_prompt_tokens=len(PROMPT))
    executor.execute_model(drive.step([(3, len(known), 0)], new=[request], freed=[3]))
    assert executor.sample_tokens(None).result().sampled_token_ids == [whole[7]]


def test_logprobs_cross(running, drive):
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=3)
    found = []
    for executor in running.values():
        new = [drive.new_request(1, PROMPT, [1], params)]
        executor.execute_model(drive.step([(1, len(PROMPT), 0)], new=new, freed=[1]))
        output = executor.sample_tokens(None).result(timeout=60)
        found.append([output.logprobs[0], *output.prompt_logprobs[0]])
    assert len(found[0]) == len(PROMPT)  # one for each position but the first, and the answer's
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)


def test_rules_on_logits_cross(running, drive):
    params = SamplingParams(
        temperature=0.9,
        seed=4,
        logit_bias={7: 3.5},
        allowed_token_ids=tuple(range(100)),
        bad_words_token_ids=((5,), (7, 7)),
        repetition_penalty=1.2,
        presence_penalty=0.5,
    )
    uni, mp = (drive.generate(executor, PROMPT, 20, params) for executor in running.values())
    assert uni == mp
    assert max(uni) < 100
    assert 5 not in uni


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_in_a_step_comes_with_its_future_and_the_next_step_works(running, drive, backend):
    executor = running[backend]
    executor.execute_model(drive.step([(2, 5, 0)], freed=[2]))
    future = executor.sample_tokens(None)
    with pytest.raises((RuntimeError, EngineError), match="slot 2 is scheduled up to token 5"):
        future.result(timeout=60)
    assert len(drive.generate(executor, PROMPT, 2, slot=2)) == 2


def test_steps_may_be_started_before_older_ones_are_sampled(running, drive):
    executor = running["mp"]
    new = [drive.new_request(slot, PROMPT, [slot]) for slot in (0, 1)]
    executor.execute_model(drive.step([(0, 9, 0)], new=new, step_id=1))
    executor.execute_model(drive.step([(1, 4, 0)], step_id=2))
    first, second = executor.sample_tokens(None), executor.sample_tokens(None)
    assert first.result(timeout=60).step_id == 1
    assert second.result(timeout=60).sampled_token_ids == [-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_cannot_be_loaded(make_config, tiny_folder, tmp_path, backend):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"has neither model.safetensors") as caught:
        _start(make_config, tmp_path, distributed_executor_backend=backend)
    assert caught.value.field == "model.safetensors"


def test_death_of_the_worker_fails_futures_and_health(make_config, tiny_folder, drive):
    executor = create_executor(
        make_config(tiny_folder, distributed_executor_backend="mp"), read_model_spec(tiny_folder)
    )
    try:
        executor.load_model(lambda stage, progress: None)
        pid = _worker_process(executor).pid
        os.kill(pid, signal.SIGSTOP)  # so that the answer is surely still to come
        executor.execute_model(drive.step([]))
        future = executor.sample_tokens(None)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=f"process {pid}.*SIGKILL"):
            future.result(timeout=60)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            executor.check_health()
        with pytest.raises(EngineDeadError):
            executor.sample_tokens(None).result(timeout=60)
        with pytest.raises(EngineDeadError):
            executor.warm_up(lambda stage, progress: None)
    finally:
        executor.shutdown()
        executor.shutdown()
    assert not psutil.pid_exists(pid)


def test_a_worker_that_is_stopped_counts_as_dead(make_config, tiny_folder, drive):
    executor = _start(
        make_config, tiny_folder, distributed_executor_backend="mp", heartbeat_timeout=3
    )
    try:
        executor.check_health()
        os.kill(_worker_process(executor).pid, signal.SIGSTOP)
        executor.execute_model(drive.step([]))
        with pytest.raises(EngineDeadError, match="no sign of life for 3 seconds"):
            executor.sample_tokens(None).result(timeout=60)
        with pytest.raises(EngineDeadError):
            executor.check_health()
    finally:
        executor.shutdown()


@pytest.mark.parametrize("stopped", [False, True], ids=["at once", "hanging"])
def test_shutdown_leaves_no_process_even_while_loading(make_config, tiny_folder, stopped):
    executor = create_executor(
        make_config(tiny_folder, distributed_executor_backend="mp"), read_model_spec(tiny_folder)
    )
    worker = _worker_process(executor)
    if stopped:
        os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - began < 10 * (STOP_TIMEOUT + TERMINATE_TIMEOUT)
    assert not worker.is_running()
    with pytest.raises(EngineDeadError):
        executor.warm_up(lambda stage, progress: None)


def test_the_worker_has_a_title(running):
    assert "".join(_worker_process(running["mp"]).cmdline()).startswith("octavo: worker 0")


def test_memory_for_the_cache(make_config, tiny_folder):
    spec = read_model_spec(tiny_folder)
    executor = create_executor(make_config(tiny_folder, kv_cache_memory=None), spec)
    executor.load_model(lambda stage, progress: None)
    available = executor.determine_available_memory()
    assert 0 < available <= 4 << 30
    assert available <= psutil.virtual_memory().available

    executor = create_executor(make_config(tiny_folder, kv_cache_memory=1 << 50), spec)
    executor.load_model(lambda stage, progress: None)
    with pytest.raises(ConfigError, match=r"kv_cache_memory is 1048576.00 GiB \(from flag"):
        executor.determine_available_memory()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types(make_config, tiny_folder, drive, dtype):
    executor = _start(make_config, tiny_folder, dtype=dtype, quantization="none")
    assert executor.dtype == dtype
    assert len(drive.generate(executor, PROMPT, 3)) == 3


def test_a_gpu_that_is_not_there(make_config, tiny_folder):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    executor = create_executor(
        make_config(tiny_folder, device="cuda"), read_model_spec(tiny_folder)
    )
    with pytest.raises(ConfigError, match=r"device is cuda \(from flag --device\).*--device cpu"):
        executor.load_model(lambda stage, progress: None)


def test_a_host_tier_for_which_there_is_no_memory(make_config, tiny_folder, monkeypatch):
    monkeypatch.setattr("octavo_worker.worker.available_cpu_memory", lambda: 1 << 30)
    config = make_config(tiny_folder, swap_space=1 << 40)
    executor = create_executor(config, read_model_spec(tiny_folder))
    executor.load_model(lambda stage, progress: None)
    executor.initialize_kv_cache(20, 1000)
    message = r"swap_space is 1024\.00 GiB \(from .* only 0\.50 GiB .* beside 0\.50 GiB of KV cache"
    with pytest.raises(ConfigError, match=message):
        executor.initialize_kv_cache(1 << 17, 1 << 20)  # blocks of 16 tokens of 256 bytes


@pytest.mark.parametrize("user_error", [True, False])
def test_a_users_mistake_comes_without_a_traceback(make_config, tiny_folder, caplog, user_error):
    error = ConfigError("no", field="x") if user_error else RuntimeError("no")
    spec = msgspec.msgpack.encode(read_model_spec(tiny_folder))
    handler = CommandHandler(0, make_config(tiny_folder), spec, "", lambda progress: None)
    handler._worker.initialize_kv_cache = lambda *_: (_ for _ in ()).throw(error)
    reply = handler.handle(messages.InitializeKVCache(1))
    assert isinstance(messages.error_of(reply), ConfigError if user_error else EngineError)
    assert bool(caplog.records) is not user_error


def test_messages_are_plain_data():
    command = messages.InitializeKVCache(7)
    assert messages.decode_command(messages.encode(command)) == command
    with pytest.raises(msgspec.DecodeError):
        messages.decode_reply(messages.encode(command))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModelError("bad", field="config.json"), ModelError),
        (errors.ContextLengthError("long", field="prompt"), errors.ContextLengthError),
        (EngineDeadError("gone"), EngineDeadError),
        (KeyError("x"), EngineError),
    ],
)
def test_errors_cross_as_kind_message_and_field(error, kind):
    failure = messages.decode_reply(messages.encode(messages.failure_of(error)))
    again = messages.error_of(failure)
    assert type(again) is kind
    assert str(error) in str(again)
    assert getattr(again, "field", None) == getattr(error, "field", None)
