"""The client against a scripted engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo_core.config import EngineConfig
from octavo_core.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelError,
    QueueFullError,
    RequestFailedError,
)
from octavo_core.model_spec import read_model_spec
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreRequest
from octavo_server import generation as generation_module
from octavo_server.engine_client import EngineClient
from octavo_server.engine_handle import EngineState
from octavo_server.engine_keeper import EngineKeeper
from octavo_server.engine_process import EngineProcess
from octavo_server.generation import Generation, join_deltas
from octavo_server.input_processor import InputProcessor
from octavo_server.output_processor import OutputProcessor
from octavo_server.request_output import OutputDelta
from octavo_server.supervisor import Supervisor
from octavo_server.tokenizer import load_tokenizer
from support.scripted_engine import (
    EXIT_CODE,
    run_broken_model,
    run_dying_start,
    run_scripted_engine,
    run_slow_start,
    write_byte_model,
)


@asynccontextmanager
async def running_client(
    folder: Path, target: Any = run_scripted_engine, limit: int = 8
) -> AsyncIterator[EngineClient]:
    process = EngineProcess("warning", target)

    def never() -> EngineProcess:
        raise AssertionError("an engine that has ended is not replaced here")

    client = EngineClient(EngineKeeper(process, Supervisor(never, restarts=False)), limit)
    model = write_byte_model(folder / "model")
    client.output_processor = OutputProcessor(load_tokenizer(model))
    client.configure(EngineConfig(model_path=str(model)))
    try:
        yield client
    finally:
        await client.close()
        assert not process.process.is_alive()


def requests(folder: Path, request_id: str, prompt: str, **params: Any) -> list[EngineCoreRequest]:
    model = folder / "model"
    processor = InputProcessor(load_tokenizer(model), read_model_spec(model), 512)
    return processor.process(request_id, prompt, SamplingParams(**{"max_tokens": 400, **params}))


async def text_of(generation: Generation) -> str:
    text = ""
    async for deltas in generation:
        for delta in deltas:
            if delta.error is not None:
                raise delta.error.to_exception()
            text += delta.text
    return text


async def test_choices_of_one_request(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        generation = client.generate("r", requests(tmp_path, "r", "hello", n=2))
        assert client.num_in_flight == 2
        texts = ["", ""]
        async for deltas in generation:
            for delta in deltas:
                assert delta.request_id == "r"
                texts[delta.index] += delta.text
        assert texts == ["hello", "hello"]
        assert client.num_in_flight == 0
        assert client._generations == {}


async def test_a_slow_reader_gets_joined_deltas(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        prompt = "0123456789" * 15
        generation = client.generate("r", requests(tmp_path, "r", prompt, logprobs=1))
        while client.num_in_flight:
            await asyncio.sleep(0.02)
            assert all(len(deltas) <= 64 for deltas in generation._pending.values())
        batches = [deltas async for deltas in generation]
        assert len(batches) == 1
        (delta,) = batches[0]
        assert delta.text == prompt
        assert delta.finish_reason == "stop"
        assert delta.logprobs is not None
        assert len(delta.logprobs) == len(delta.token_ids) == len(prompt) + 1


async def test_a_reader_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    """What waits for it is dropped, and its places are free: n=2, of which one is enough."""
    monkeypatch.setattr(generation_module, "MAX_PENDING_BYTES", 100_000)
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        params = {"logprobs": 20, "n": 2}
        generation = client.generate("r", requests(tmp_path, "r", "slow" * 60, **params))
        while client.num_in_flight:
            await asyncio.sleep(0.02)
            waiting = [d for deltas in generation._pending.values() for d in deltas]
            assert sum(len(d.logprobs or ()) for d in waiting) <= 100_000 / (21 * 220) + 1
        with pytest.raises(RequestFailedError, match="100000 bytes"):
            await text_of(generation)
        # Who reads gets all of it, however much it is.
        generation = client.generate("s", requests(tmp_path, "s", "fast" * 60, **params))
        assert len(await text_of(generation)) == 2 * 240


async def test_closing_aborts_exactly_once(tmp_path: Path, monkeypatch: Any) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        aborts: list[list[str]] = []
        send = client.engine._send  # type: ignore[attr-defined]
        monkeypatch.setattr(
            client.engine,
            "_send",
            lambda m: (
                (aborts.append(m.request_ids), send(m)) if hasattr(m, "request_ids") else send(m)
            ),
        )
        async with client.generate("r", requests(tmp_path, "r", "slow" * 60, n=2)) as generation:
            await anext(generation)
        generation.close()
        assert aborts == [["r-0", "r-1"]]
        assert client.num_in_flight == 0
        # The engine has forgotten them: the next step's statistics show one running request.
        await text_of(client.generate("s", requests(tmp_path, "s", "x")))
        assert client.stats.num_running == 0


async def test_cancelling_the_reader_aborts(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()

        async def read() -> None:
            async with client.generate("r", requests(tmp_path, "r", "slow" * 60)) as generation:
                await text_of(generation)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        assert client.num_in_flight == 1
        task.cancel()
        await asyncio.wait({task})
        assert client.num_in_flight == 0


async def test_a_full_queue(tmp_path: Path) -> None:
    async with running_client(tmp_path, limit=3) as client:
        await client.wait_ready()
        first = client.generate("r", requests(tmp_path, "r", "slow" * 60, n=2))
        with pytest.raises(QueueFullError, match="max-num-queued-reqs"):
            client.generate("s", requests(tmp_path, "s", "x", n=2))
        with pytest.raises(InvalidRequestError, match="at most 3"):
            client.generate("t", requests(tmp_path, "t", "x", n=4))
        first.close()
        assert await text_of(client.generate("u", requests(tmp_path, "u", "x", n=3))) == "xxx"


async def test_a_stop_string_aborts_in_the_engine(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        generation = client.generate("r", requests(tmp_path, "r", "slow one two", stop=("two",)))
        assert await text_of(generation) == "slow one "
        assert client.num_in_flight == 0


async def test_a_failed_request_is_a_delta_with_an_error(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        generation = client.generate("r", requests(tmp_path, "r", "break"))
        (delta,) = await anext(generation)
        assert delta.error is not None
        assert isinstance(delta.error.to_exception(), RequestFailedError)
        assert client.num_in_flight == 0


async def test_a_late_reader_gets_the_text_before_the_error(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        generation = client.generate("r", requests(tmp_path, "r", "crack it"))
        while client.num_in_flight:
            await asyncio.sleep(0.02)
        (text,), (error,) = [deltas async for deltas in generation]
        assert (text.error, text.finish_reason) == (None, None)
        assert text.text
        assert error.error is not None


async def test_the_engines_death_reaches_every_reader(tmp_path: Path) -> None:
    async with running_client(tmp_path) as client:
        await client.wait_ready()
        bystander = client.generate("r", requests(tmp_path, "r", "slow" * 60))
        culprit = client.generate("s", requests(tmp_path, "s", "die, engine"))
        with pytest.raises(EngineDeadError, match=f"exit code {EXIT_CODE}"):
            await text_of(culprit)
        with pytest.raises(EngineDeadError):
            await text_of(bystander)
        assert client.state is EngineState.DEAD
        # What it had counted stays; its load is gone with it.
        assert client.stats.num_running == client.stats.num_waiting == 0
        assert client.stats.prefix_cache_queries > 0
        with pytest.raises(EngineDeadError):
            client.generate("t", requests(tmp_path, "t", "x"))
        assert isinstance(await client.wait_dead(), EngineDeadError)


async def test_loading_shows_its_stage(tmp_path: Path) -> None:
    async with running_client(tmp_path, run_slow_start) as client:
        while client.stage != "loading weights":
            await asyncio.sleep(0.02)
        assert client.progress == 0.25
        assert client.state is EngineState.STARTING
        with pytest.raises(EngineDeadError):
            client.generate("r", requests(tmp_path, "r", "x"))


async def test_a_model_error_keeps_its_type(tmp_path: Path) -> None:
    async with running_client(tmp_path, run_broken_model) as client:
        with pytest.raises(ModelError, match="wrong shape") as raised:
            await client.wait_ready()
        assert raised.value.field == "model"


async def test_a_death_without_a_word_while_loading(tmp_path: Path) -> None:
    async with running_client(tmp_path, run_dying_start) as client:
        with pytest.raises(EngineDeadError, match=f"exit code {EXIT_CODE} while starting"):
            await client.wait_ready()


def test_joining_deltas_keeps_the_last_word() -> None:
    first = OutputDelta(request_id="r", index=0, text="a", token_ids=[1], num_cached_tokens=16)
    last = OutputDelta(
        request_id="r", index=0, text="b", token_ids=[2], finish_reason="stop", stop_reason="x"
    )
    joined = join_deltas([first, last])
    assert (joined.text, joined.token_ids) == ("ab", [1, 2])
    assert (joined.finish_reason, joined.stop_reason) == ("stop", "x")
    assert joined.num_cached_tokens == 16
    assert joined.logprobs is None
