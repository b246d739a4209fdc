from __future__ import annotations

import pytest

from octavo_core.errors import InvalidRequestError, RequestFailedError
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from octavo_server.output_processor import OutputProcessor
from octavo_server.request_output import (
    OutputAccumulator,
    OutputDelta,
    OutputError,
    RequestOutput,
)
from octavo_server.tokenizer import Tokenizer

EOS = 2


class Choice:
    """One choice in an output processor of its own, fed step by step."""

    def __init__(self, tokenizer: Tokenizer, **params: object) -> None:
        self.tokenizer = tokenizer
        self.processor = OutputProcessor(tokenizer)
        sampling_params = SamplingParams(**params)  # type: ignore[arg-type]
        request = EngineCoreRequest("r-0", [1, 2, 3], sampling_params)
        self.processor.add(request, "r", 0)
        self.accumulator = OutputAccumulator("r", "prompt", [1, 2, 3])
        self.aborted: list[str] = []
        self.deltas: list[OutputDelta] = []

    def step(
        self, token_ids: list[int], finish_reason: str | None = None, **fields: object
    ) -> None:
        output = EngineCoreOutput("r-0", token_ids, finish_reason, **fields)  # type: ignore[arg-type]
        deltas, aborted = self.processor.process([output])
        self.aborted += aborted
        self.deltas += deltas
        for delta in deltas:
            self.accumulator.add(delta)

    def say(self, text: str, tokens_a_step: int = 1) -> None:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids), tokens_a_step):
            self.step(ids[start : start + tokens_a_step])

    def result(self) -> RequestOutput:
        return self.accumulator.result()


def test_a_whole_answer(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer)
    choice.say("Hello 🫠 there")
    assert not choice.accumulator.finished
    choice.step([EOS], "stop", num_cached_tokens=2)
    output = choice.result().outputs[0]
    assert output.text == "Hello 🫠 there"
    assert output.token_ids == [*starter_tokenizer.encode("Hello 🫠 there"), EOS]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert choice.result().num_cached_tokens == 2
    assert all("\ufffd" not in delta.text for delta in choice.deltas)
    assert {delta.num_prompt_tokens for delta in choice.deltas} == {3}
    assert choice.accumulator.finished


@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abc the")])
def test_stop_token(starter_tokenizer: Tokenizer, include: bool, text: str) -> None:
    (the,) = starter_tokenizer.encode(" the")
    choice = Choice(starter_tokenizer, stop_token_ids=(the,), include_stop_str_in_output=include)
    choice.say("abc")
    choice.step([the], "stop", stop_reason=the)
    output = choice.result().outputs[0]
    assert output.text == text
    assert output.token_ids[-1] == the
    assert output.stop_reason == the


def test_end_token_is_no_text_even_with_special_tokens(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer, skip_special_tokens=False)
    choice.step([1])
    choice.step([EOS], "stop")
    assert choice.result().outputs[0].text == "<|im_start|>"
    # After ignore_eos it is a token like any other.
    choice = Choice(starter_tokenizer, skip_special_tokens=False, ignore_eos=True)
    choice.step([EOS], "length")
    assert choice.result().outputs[0].text == "<|im_end|>"


@pytest.mark.parametrize(("include", "text"), [(False, "ABC"), (True, "ABCDEFGHIJ")])
@pytest.mark.parametrize("tokens_a_step", [1, 2, 100])
def test_stop_string(
    starter_tokenizer: Tokenizer, include: bool, text: str, tokens_a_step: int
) -> None:
    choice = Choice(starter_tokenizer, stop=("DEFGHIJ",), include_stop_str_in_output=include)
    choice.say("ABCDEFGHIJKLMNOPQRSTUVW", tokens_a_step)
    output = choice.result().outputs[0]
    assert output.text == text
    assert (output.finish_reason, output.stop_reason) == ("stop", "DEFGHIJ")
    assert choice.aborted == ["r-0"]
    # Tokens up to the one that completed the stop string, and nothing after the last delta.
    said = starter_tokenizer.decode(output.token_ids)
    assert "DEFGHIJ" in said
    assert "DEFGHIJ" not in starter_tokenizer.decode(output.token_ids[:-1])
    assert choice.deltas[-1].finish_reason == "stop"


def test_stop_string_in_the_last_token(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer, stop=("lo",))
    choice.step(starter_tokenizer.encode("hello"), "length")
    output = choice.result().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("hel", "stop", "lo")
    assert choice.aborted == []  # the engine has ended it itself


def test_held_text_is_flushed_at_the_end(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer, stop=("abcdef",))
    choice.say("xyz abc")
    assert choice.result().outputs[0].text == "xyz "
    choice.step([], "abort")
    assert choice.result().outputs[0].text == "xyz abc"


def test_without_detokenize(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer, detokenize=False)
    choice.say("Hello")
    choice.step([EOS], "stop")
    output = choice.result().outputs[0]
    assert output.text == ""
    assert len(output.token_ids) == 2


def test_logprobs(starter_tokenizer: Tokenizer) -> None:
    half = starter_tokenizer.encode("龜")[0]
    (hello,) = starter_tokenizer.encode("Hello")
    choice = Choice(starter_tokenizer, logprobs=1)
    position = TokenLogprobs([half, hello], [-3.0, -0.5], 7)
    choice.step([half], logprobs=[position])
    choice.step([hello], "length", logprobs=[TokenLogprobs([hello, hello], [-0.1, -0.1], 1)])
    first, second = choice.result().outputs[0].logprobs or []
    assert first.rank == 7
    assert first.chosen.token_id == half
    assert first.chosen.token == "\ufffd"
    assert first.chosen.token_bytes == "龜".encode()[: len(first.chosen.token_bytes)]
    assert [(top.token, top.logprob) for top in first.top] == [("Hello", -0.5)]
    assert second.chosen == second.top[0]


def test_errors(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer)
    choice.step([], "error", error="too long", error_kind="InvalidRequestError")
    with pytest.raises(InvalidRequestError, match="too long"):
        choice.result()
    choice = Choice(starter_tokenizer)
    choice.step([], "error")
    with pytest.raises(RequestFailedError):
        choice.result()


@pytest.mark.parametrize("kind", ["annotations", "OctavoError", "SystemExit", "UserError", "x"])
def test_only_our_own_error_classes_are_raised(kind: str) -> None:
    assert type(OutputError(kind, "m").to_exception()) is RequestFailedError


def test_removed_and_unknown_requests_are_dropped(starter_tokenizer: Tokenizer) -> None:
    choice = Choice(starter_tokenizer)
    choice.processor.remove("r-0")
    choice.processor.remove("r-0")
    choice.step([5])
    assert choice.deltas == []


def test_choices_are_joined_by_index(starter_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(starter_tokenizer)
    accumulator = OutputAccumulator("r", None, [1], num_choices=2)
    for index in (0, 1):
        processor.add(EngineCoreRequest(f"r-{index}", [1], SamplingParams()), "r", index)
    hello, bye = starter_tokenizer.encode("Hello"), starter_tokenizer.encode("Bye")
    outputs = [EngineCoreOutput("r-1", bye, "length"), EngineCoreOutput("r-0", hello, "length")]
    for delta in processor.process(outputs)[0]:
        accumulator.add(delta)
    assert [output.text for output in accumulator.result().outputs] == ["Hello", "Bye"]
    assert [output.index for output in accumulator.result().outputs] == [0, 1]
