"""Which part of the model a worker computes, and how it speaks to those with the other parts.

Ranks count tensor-parallel neighbours first: with 2 stages of 2 workers, ranks 0 and 1 are the
first stage. The ranks of a stage share each layer and add up their parts of a result; a stage
hands its hidden states to the same place of the next stage.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

# psutil publishes no types.
import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor

from octavo_core.errors import EngineError
from octavo_core.memory_planner import pipeline_stages

TIMEOUT = timedelta(minutes=30)
"""How long one waits for another: the first to compile kernels may need minutes. A worker that
is gone is noticed by the executor, in milliseconds."""

_TCP = "tcp://"
_LOOPBACK = "127.0.0.1"


class ParallelPlace(NamedTuple):
    """The place of one worker among all.

    Attributes:
        rank: Index among the workers of the engine.
        tensor_parallel_size: Workers of a stage.
        pipeline_parallel_size: Stages.
    """

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Workers of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Index within the stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Index of the stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the language-model head."""
        return self.stage == self.pipeline_parallel_size - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of its stage."""
        return pipeline_stages(num_layers, self.pipeline_parallel_size)[self.stage]


ONLY_WORKER = ParallelPlace()
"""The place of a worker that has the whole model."""


class ParallelGroup:
    """Sends tensors between the workers of one engine, by torch.distributed.

    Every worker makes the same calls in the same order.

    Args:
        place: Of this worker.
        device: Where its tensors are: NCCL connects GPUs, and gloo CPUs.
        rendezvous: A file that the workers of this engine alone can open, by which they find
            each other; gloo then listens on the loopback interface only. Or ``tcp://HOST:PORT``
            of a store on rank 0's machine, where they are on several machines.
    """

    def __init__(self, place: ParallelPlace, device: torch.device, rendezvous: str) -> None:
        self.place = place
        self._device = device
        # gloo would ask for the host's name, and listen on the address of that.
        interface = _interface_to(rendezvous)
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        if not rendezvous.startswith(_TCP):
            rendezvous = Path(rendezvous).absolute().as_uri()
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous,
            rank=place.rank,
            world_size=place.world_size,
            timeout=TIMEOUT,
        )
        # Every worker has to take part in making every group.
        size = place.tensor_parallel_size
        groups = [
            dist.new_group(list(range(first, first + size)))
            for first in range(0, place.world_size, size)
        ]
        self._stage_group = groups[place.stage]
        self._sends: list[tuple[dist.Work, Tensor]] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up what the ranks of this stage have, all of one shape.

        On CPUs the parts are added in the order of ranks, so that a row's result does not
        depend on the size of the batch, as it would by a ring.
        """
        if self.place.tensor_parallel_size == 1:
            return x
        x = x.contiguous()
        if self._device.type == "cuda":
            dist.all_reduce(x, group=self._stage_group)
            return x
        parts = [torch.empty_like(x) for _ in range(self.place.tensor_parallel_size)]
        dist.all_gather(parts, x, group=self._stage_group)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather_columns(self, x: Tensor) -> Tensor:
        """Join ``[num_rows, columns]`` of each rank of this stage side by side.

        Returns:
            ``[num_rows, columns * ranks]``, the same on each of them.
        """
        if self.place.tensor_parallel_size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.place.tensor_parallel_size)]
        dist.all_gather(parts, x, group=self._stage_group)
        return torch.cat(parts, dim=-1)

    def send(self, hidden: Tensor) -> None:
        """Send a tensor to the next stage, without waiting for it to arrive."""
        self._sends = [item for item in self._sends if not item[0].is_completed()]
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self.place.rank + self.place.tensor_parallel_size)
        assert work is not None
        self._sends.append((work, hidden))  # must not change or go before it has arrived

    def receive(self, out: Tensor) -> Tensor:
        """Receive into `out` what the stage before sent."""
        dist.recv(out, self.place.rank - self.place.tensor_parallel_size)
        return out

    def barrier(self) -> None:
        """Wait until every worker is here."""
        dist.barrier()

    def close(self) -> None:
        """Let go of the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _interface_to(rendezvous: str) -> str:
    """Return the name of the network interface that leads to the other workers."""
    own = _LOOPBACK
    if rendezvous.startswith(_TCP):
        host, _, port = rendezvous.removeprefix(_TCP).rpartition(":")
        # Nothing is sent: connecting a datagram socket chooses a route, and so an address.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, int(port)))
            own = sock.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    raise EngineError(f"no network interface has the address {own}")
