"""Carries out an engine's commands on one worker."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from octavo_core.config import EngineConfig
from octavo_core.errors import UserError
from octavo_core.model_spec import ModelSpec
from octavo_core.process import without_collections
from octavo_worker.executors import messages

logger = logging.getLogger(__name__)


class CommandHandler:
    """A worker behind its protocol, whatever carries the messages.

    Args:
        rank: Index among the workers.
        config: The engine's configuration.
        spec: A `ModelSpec` in msgpack.
        rendezvous: Where the workers find each other; empty for one alone.
        report: Sends a `Progress`.
        workers_here: How many workers share this machine; by default all of them.
    """

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        spec: bytes,
        rendezvous: str,
        report: Callable[[messages.Progress], None],
        workers_here: int | None = None,
    ) -> None:
        # Torch is imported here, when the process has its title and its manners.
        with without_collections():
            from octavo_worker.worker import Worker

        self._rank = rank
        self._send_progress = report
        self._worker = Worker(
            config,
            msgspec.msgpack.decode(spec, type=ModelSpec),
            rank,
            rendezvous,
            workers_here,
        )

    def handle(self, command: messages.Command) -> messages.Reply | None:
        """Carry out one command but `Stop`; errors become a `Failure`.

        Returns:
            The reply; None for a command that is not answered.
        """
        try:
            return self._carry_out(command)
        except UserError as error:  # who started this is told; a traceback would say no more
            return messages.failure_of(error)
        except Exception as error:
            logger.exception("worker %d: %s failed", self._rank, type(command).__name__)
            return messages.failure_of(error)

    def close(self) -> None:
        """Let go of the other workers, and take no more memory."""
        self._worker.close()

    def _carry_out(self, command: messages.Command) -> messages.Reply | None:
        worker = self._worker
        match command:
            case messages.Execute(scheduler_output, outputs):
                worker.execute_model(scheduler_output, outputs)
                return None
            case messages.Sample(grammar):
                return messages.Sampled(worker.sample_tokens(grammar))
            case messages.LoadModel():
                worker.init_device()
                worker.load_model(self._report)
                return messages.Loaded(
                    str(worker.device),
                    str(worker.dtype).removeprefix("torch."),
                    str(worker.kv_cache_dtype).removeprefix("torch."),
                    worker.device_memory,
                )
            case messages.DetermineAvailableMemory():
                return messages.Done(worker.determine_available_memory())
            case messages.InitializeKVCache(num_blocks, num_host_blocks):
                worker.initialize_kv_cache(num_blocks, num_host_blocks)
                return messages.Done()
            case messages.WarmUp():
                worker.warm_up(self._report)
                return messages.Done()
            case messages.Stop():
                raise AssertionError("whoever carries the messages ends on Stop")

    def _report(self, stage: str, progress: float | None) -> None:
        self._send_progress(messages.Progress(stage, progress))
