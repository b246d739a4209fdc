"""Choose an executor."""

from __future__ import annotations

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError
from octavo_core.executor import Executor
from octavo_core.model_spec import ModelSpec


def create_executor(config: EngineConfig, spec: ModelSpec) -> Executor:
    """Make the executor that ``distributed_executor_backend`` names.

    Args:
        config: The engine's configuration; ``model_path`` is set.
        spec: The hyper-parameters of the model there.

    Raises:
        ConfigError: The executor can't run so many workers.
    """
    # Each is imported when it is asked for: with `mp`, only the worker process needs torch.
    backend = config.parallel.backend
    if backend == "uni" and config.parallel.world_size > 1:
        raise ConfigError(
            f"distributed_executor_backend is uni (from "
            f"{config.source_of('distributed_executor_backend')}), which runs one worker, but "
            f"tensor_parallel_size times pipeline_parallel_size is {config.parallel.world_size}; "
            f"use mp or ray.",
            field="distributed_executor_backend",
        )
    if backend == "mp":
        from octavo_worker.executors.multiproc import MultiprocExecutor

        return MultiprocExecutor(config, spec)
    if backend == "ray":
        try:
            from octavo_worker.executors.ray_cluster import RayExecutor
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"distributed_executor_backend is ray (from "
                f"{config.source_of('distributed_executor_backend')}), but {error.name} is not "
                f"installed; pip install 'octavo-worker[ray]'.",
                field="distributed_executor_backend",
            ) from error

        return RayExecutor(config, spec)
    from octavo_worker.executors.uniproc import UniProcExecutor

    return UniProcExecutor(config, spec)
