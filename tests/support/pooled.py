"""Pools texts through an engine of the test's own, without any process around it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo_core.config import EngineConfig
from octavo_core.engine_core import EngineCore
from octavo_core.model_spec import read_model_spec
from octavo_core.pooler_spec import read_pooler_spec
from octavo_core.pooling_params import PooledOutput, PoolingParams
from octavo_core.sampling_params import SamplingParams
from octavo_core.wire import EngineCoreOutput, EngineCoreRequest
from octavo_worker.executors import create_executor


@contextmanager
def pooling_engine(folder: Path, **settings: Any) -> Iterator[EngineCore]:
    """An engine on a model's folder, started."""
    values = {"model_path": str(folder), "device": "cpu", "kv_cache_memory": 1 << 24, **settings}
    config = EngineConfig().replace("the test", **values)
    spec = read_model_spec(folder)
    pooler = read_pooler_spec(config, spec)
    engine = EngineCore(config, spec, create_executor(config, spec), None, pooler)
    try:
        engine.start(lambda stage, progress: None)
        yield engine
    finally:
        engine.shutdown()


def pooling_request(
    name: str, token_ids: Sequence[int], params: PoolingParams, **fields: Any
) -> EngineCoreRequest:
    """A request as the front makes it."""
    return EngineCoreRequest(
        name, list(token_ids), SamplingParams(max_tokens=1), pooling_params=params, **fields
    )


def run(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> dict[str, EngineCoreOutput]:
    """Run requests to their ends."""
    for request in requests:
        engine.add_request(request)
    ended: dict[str, EngineCoreOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            assert output.request_id not in ended
            ended[output.request_id] = output
    return ended


def to_array(pooled: PooledOutput) -> NDArray[np.float32]:
    """Return the numbers in their shape."""
    return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)


def pool_all(
    engine: EngineCore, texts: Sequence[Sequence[int]], params: PoolingParams | None = None
) -> list[NDArray[np.float32]]:
    """Pool texts together and return what came out, in their order."""
    requests = [
        pooling_request(str(number), text, params or PoolingParams())
        for number, text in enumerate(texts)
    ]
    outputs = run(engine, requests)
    pooled = [outputs[request.request_id].pooled for request in requests]
    assert None not in pooled, outputs
    return [to_array(item) for item in pooled if item is not None]


def write_modules(folder: Path, mode: str, *, normalize: bool = True) -> None:
    """Write what sentence-transformers writes beside a model.

    Args:
        mode: ``mean_tokens``, ``cls_token`` or ``lasttoken``.
    """
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
