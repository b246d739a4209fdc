"""From the engine's tokens to deltas of text."""

from __future__ import annotations

from octavo_core.wire import EngineCoreOutput, EngineCoreRequest
from octavo_server.request_output import OutputDelta
from octavo_server.tokenizer import Tokenizer


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer) -> None:
        raise NotImplementedError

    def add(self, request: EngineCoreRequest, request_id: str, index: int) -> None:
        raise NotImplementedError

    def remove(self, engine_request_id: str) -> None:
        raise NotImplementedError

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[OutputDelta], list[str]]:
        raise NotImplementedError
