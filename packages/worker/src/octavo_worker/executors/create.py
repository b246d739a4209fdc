"""Choose an executor."""

from __future__ import annotations

from octavo_core.config import EngineConfig
from octavo_core.executor import Executor
from octavo_core.model_spec import ModelSpec


def create_executor(config: EngineConfig, spec: ModelSpec) -> Executor:
    """Make the executor that ``distributed_executor_backend`` names.

    Args:
        config: The engine's configuration; ``model_path`` is set.
        spec: The hyper-parameters of the model there.
    """
    # Each is imported when it is asked for: with `mp`, only the worker process needs torch.
    if config.parallel.distributed_executor_backend == "mp":
        from octavo_worker.executors.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, spec)
    from octavo_worker.executors.uniproc import UniProcExecutor

    return UniProcExecutor(config, spec)
