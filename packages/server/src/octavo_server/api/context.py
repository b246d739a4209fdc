"""What the routes share: the engine, the text processing and the model's name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from octavo_core.config import EngineConfig
from octavo_core.pooler_spec import PoolerSpec
from octavo_server.answer_parser import AnswerFormat
from octavo_server.api.errors import ApiError
from octavo_server.api.fronts import Fronts, OneFront
from octavo_server.api.model_kind import refused_apis
from octavo_server.api.responses_store import ResponseStore
from octavo_server.engine_client import EngineClient
from octavo_server.engine_handle import EngineState
from octavo_server.grammar_checker import GrammarChecker
from octavo_server.http_counts import HTTPCounts
from octavo_server.input_processor import InputProcessor
from octavo_server.pooling_input_processor import PoolingInputProcessor
from octavo_server.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo_server.metrics_export import MetricsExporter


@dataclass
class LoadedModel:
    """What is known once start-up is done.

    Attributes:
        name: The model's name in the API.
        max_model_len: Most tokens of prompt and answer.
        sampling_defaults: Sampling fields from the model's generation_config.json.
        can_chat: False if there is no chat template, or none that works.
        answer_format: How it writes calls of tools and reasoning.
    """

    name: str
    max_model_len: int
    tokenizer: Tokenizer
    input_processor: InputProcessor
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    can_chat: bool = True
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def pooler(self) -> PoolerSpec | None:
        """What the model pools; None for one that generates text."""
        processor = self.input_processor
        return processor.pooler if isinstance(processor, PoolingInputProcessor) else None

    def pooling_processor(self) -> PoolingInputProcessor:
        """Return the input processor of a model that pools; others have no such routes."""
        processor = self.input_processor
        assert isinstance(processor, PoolingInputProcessor), "the gate lets no request through"
        return processor

    @cached_property
    def refused_apis(self) -> Mapping[str, str]:
        """Why the model can't answer on some paths."""
        return refused_apis(self.pooler)

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name; none at all means this one.

        Raises:
            ApiError: 404, with the name that would work.
        """
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"there is no model {name!r} here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )


@dataclass
class ServerContext:
    """The state behind one app.

    Attributes:
        client: The engine, or several of them behind one client.
        config: All settings.
        model: None until start-up is done.
        drain: Set once the server takes no new requests.
        responses: Answers of the Responses API that may be gone on from.
        num_open: Requests that need the engine and whose answers are not out yet.
        sleep_level: 0 to 2 while the operator has it take no new requests; None if it does.
        http: HTTP requests so far, of this front.
        fronts: All fronts of the server, this one among them.
        grammar_checker: Tries out the constraints of structured output.
    """

    client: EngineClient
    config: EngineConfig = field(default_factory=EngineConfig)
    model: LoadedModel | None = None
    drain: asyncio.Event = field(default_factory=asyncio.Event)
    responses: ResponseStore = field(default_factory=ResponseStore)
    num_open: int = 0
    sleep_level: int | None = None
    http: HTTPCounts = field(default_factory=HTTPCounts)
    fronts: Fronts = field(init=False)
    grammar_checker: GrammarChecker = field(default_factory=GrammarChecker)
    _exporter: MetricsExporter | None = None

    def __post_init__(self) -> None:
        """Be the only front, until told otherwise."""
        self.fronts = OneFront(self)

    @property
    def sleeping(self) -> bool:
        """True while the operator has the server take no new requests."""
        return self.sleep_level is not None or self.client.state is EngineState.ASLEEP

    @property
    def draining(self) -> bool:
        """True once the server takes no new requests."""
        return self.drain.is_set()

    def loaded_model(self) -> LoadedModel:
        """Return the model; routes that need it are closed until there is one."""
        assert self.model is not None, "the gate lets no request through before this"
        return self.model

    def exporter(self) -> MetricsExporter:
        """Return what writes the metrics, made when it is first asked for."""
        if self._exporter is None:
            from octavo_server.metrics_export import MetricsExporter

            self._exporter = MetricsExporter(self)
        return self._exporter


def context_of(request: Request) -> ServerContext:
    """Return the context that `create_app` was given."""
    context: ServerContext = request.app.state.context
    return context
