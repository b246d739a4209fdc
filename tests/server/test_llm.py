"""`LLM` on the real engine core, with an executor that needs no weights."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo_core.errors import ConfigError, InvalidRequestError, ModelError, RequestFailedError
from octavo_core.scheduler_output import SchedulerOutput
from octavo_server import LLM, SamplingParams
from support.engine_fakes import FakeExecutor, expected_output

BLOCK_SIZE = 16


class Executor(FakeExecutor):
    """Calls back before each step."""

    def __init__(self) -> None:
        super().__init__(BLOCK_SIZE, num_slots=8)
        self.before_step: Callable[[int], None] = lambda step: None
        self.num_started = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.num_started += 1
        self.before_step(self.num_started)
        super().execute_model(scheduler_output)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Executor:
    made = Executor()
    # In place of the worker package, which the server's own tests do without.
    module = types.ModuleType("octavo_worker.executors")
    module.create_executor = lambda config, spec: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo_worker.executors", module)
    return made


@pytest.fixture
def llm(executor: Executor, make_folder: Callable[..., Path]) -> Iterator[LLM]:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = make_folder(tokenizer_config={"bos_token": "<s>", "chat_template": template})
    with LLM(str(folder), max_num_seqs=8, block_size=BLOCK_SIZE) as made:
        yield made


def params(max_tokens: int = 6, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def test_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = ["Hello", "A longer prompt, with words", "x"] * 5
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt or "")
        (choice,) = output.outputs
        assert choice.token_ids == expected_output(output.prompt_token_ids, 6)
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
        assert choice.finish_reason == "length"


def test_shapes_of_prompts(llm: LLM) -> None:
    (text,) = llm.generate("Hi", params(), use_tqdm=False)
    (ids,) = llm.generate([5, 6, 7], params(), use_tqdm=False)
    two = llm.generate([[5, 6, 7], [8]], [params(2), params(3)], use_tqdm=False)
    assert text.prompt == "Hi"
    assert (ids.prompt, ids.prompt_token_ids) == (None, [5, 6, 7])
    assert [len(output.outputs[0].token_ids) for output in two] == [2, 3]
    assert llm.generate([], params(), use_tqdm=False) == []


def test_several_choices(llm: LLM) -> None:
    (output,) = llm.generate(["Hi"], params(n=3), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(conversation, params(), use_tqdm=False)
    two = llm.chat([conversation, conversation], params(), use_tqdm=False)
    assert one.prompt_token_ids == llm.tokenizer.encode("<s>Hi")
    assert [output.outputs for output in two] == [one.outputs, one.outputs]


def test_chat_takes_a_turn_without_content(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": None}], params(), use_tqdm=False)
    assert output.prompt_token_ids == llm.tokenizer.encode("<s>")


@pytest.mark.parametrize("messages", ["hi", ["hi"], [[{"role": "user"}], "hi"], [["hi"]], 5])
def test_chat_refuses_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="list of messages") as raised:
        llm.chat(messages, params(), use_tqdm=False)
    assert raised.value.field == "messages"


@pytest.mark.parametrize("wrong", [{"max_tokens": 4}, [{"max_tokens": 4}], 4])
def test_other_things_than_sampling_params_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams") as raised:
        llm.generate(["Hello"], wrong, use_tqdm=False)
    assert raised.value.field == "sampling_params"


def test_stop_string_ends_the_engines_work(llm: LLM, executor: Executor) -> None:
    (free,) = llm.generate(["Hello"], params(400), use_tqdm=False)
    text = free.outputs[0].text
    stop = text[5]
    executor.num_steps = 0
    (stopped,) = llm.generate(["Hello"], params(400, stop=(stop,)), use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop
    assert executor.num_steps < 400
    assert not llm.engine.has_unfinished_requests()


def test_nothing_runs_if_one_prompt_is_wrong(llm: LLM, executor: Executor) -> None:
    for wrong in ([["good"], [10**6]], ["good", ""], ["good", 5]):
        with pytest.raises(InvalidRequestError):
            llm.generate(wrong, params(), use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="2 items for 1 prompts"):
        llm.generate(["good"], [params(), params()], use_tqdm=False)
    assert executor.num_started == 0
    assert not llm.engine.has_unfinished_requests()


class Everyone(set[str]):
    """A set that has everyone in it."""

    def __contains__(self, name: object) -> bool:
        return True


def test_steps_that_fail_for_good_are_raised_and_the_llm_goes_on(
    llm: LLM, executor: Executor
) -> None:
    executor.poison = Everyone()
    with pytest.raises(RequestFailedError, match="made the engine's step fail"):
        llm.generate(["a", "b"], params(), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    executor.poison = set()
    (output,) = llm.generate(["a"], params(), use_tqdm=False)
    assert output.outputs[0].token_ids == expected_output(output.prompt_token_ids, 6)


def test_a_step_that_fails_once_costs_nothing(llm: LLM, executor: Executor) -> None:
    executor.fail_next_step = True
    for output in llm.generate(["a", "b"], params(), use_tqdm=False):
        assert output.outputs[0].token_ids == expected_output(output.prompt_token_ids, 6)


def test_interrupt_aborts_and_the_llm_goes_on(llm: LLM, executor: Executor) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    executor.before_step = interrupt
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params(100), use_tqdm=False)
    assert executor.num_started == 3
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm.engine.has_unfinished_requests()
    (output,) = llm.generate(["a"], params(), use_tqdm=False)
    assert output.outputs[0].token_ids == expected_output(output.prompt_token_ids, 6)


def test_threads_take_turns(llm: LLM) -> None:
    results: dict[int, list[int]] = {}

    def run(index: int) -> None:
        (output,) = llm.generate([[index, 7]], params(20), use_tqdm=False)
        results[index] = output.outputs[0].token_ids

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: expected_output([index, 7], 20) for index in range(4)}


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], params())
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown
    llm.generate(["a", "b"], params(), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_shuts_down(executor: Executor, make_folder: Callable[..., Path]) -> None:
    with LLM(str(make_folder())):
        assert not executor.is_shut_down
    assert executor.is_shut_down


def test_failed_start_shuts_down(
    executor: Executor, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(on_progress: object) -> None:
        raise ModelError("no weights")

    monkeypatch.setattr(executor, "load_model", fail)
    with pytest.raises(ModelError, match="no weights"):
        LLM(str(make_folder()))
    assert executor.is_shut_down


def test_wrong_settings(executor: Executor) -> None:
    with pytest.raises(ConfigError, match="block_siez"):
        LLM(block_siez=8)
    with pytest.raises(ModelError, match="/no/such does not exist"):
        LLM("/no/such")


def test_defaults_come_from_the_model(
    executor: Executor, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(generation_config={"temperature": 0.6, "top_k": 20, "top_p": None})
    seen: list[SamplingParams] = []
    with LLM(str(folder)) as llm:
        add_request = llm.engine.add_request
        monkeypatch.setattr(
            llm.engine,
            "add_request",
            lambda request: (seen.append(request.sampling_params), add_request(request)),
        )
        llm.generate("a", use_tqdm=False)
        llm.generate("a", SamplingParams(), use_tqdm=False)
    assert [(p.temperature, p.top_k, p.top_p) for p in seen] == [(0.6, 20, 1.0), (1.0, 0, 1.0)]
