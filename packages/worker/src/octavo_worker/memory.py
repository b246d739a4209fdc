"""How much memory there is, on the host and on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

# psutil publishes no types.
import psutil  # type: ignore[import-untyped]
import torch

from octavo_core import cgroup
from octavo_core.errors import ConfigError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def available_cpu_memory() -> int:
    """Return the bytes this process may still take: free memory, within its limits.

    They are the container's, and that of the process's addresses (``ulimit -v``).
    """
    available = int(psutil.virtual_memory().available)
    limits = (cgroup.memory_left(), _addresses_left())
    return min([available, *(left for left in limits if left is not None)])


def _addresses_left() -> int | None:
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(limit - int(psutil.Process().memory_info().vms), 0)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cpu":
        return available_cpu_memory()
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class MemorySnapshot:
    """The memory of a GPU at one moment, whoever uses it.

    Attributes:
        free: Bytes that are free.
        total: Bytes of the device.
    """

    free: int
    total: int

    @classmethod
    def take(cls, device: torch.device) -> MemorySnapshot:
        """Look at a GPU."""
        return cls(*torch.cuda.mem_get_info(device))

    def request(self, share: float, device: str) -> int:
        """Return a share of the device in bytes.

        Raises:
            ConfigError: So much is not free.
        """
        requested = math.ceil(self.total * share)
        if self.free < requested:
            raise ConfigError(
                f"gpu_memory_utilization={share} asks for {gib(requested)} of {device}, "
                f"but only {gib(self.free)} are free; lower it, or end what uses the "
                f"device.",
                field="gpu_memory_utilization",
            )
        return requested

    def taken_since(self, device: torch.device) -> int:
        """Return the bytes that are less free now than then."""
        return self.free - MemorySnapshot.take(device).free


def gib(num_bytes: int) -> str:
    """Write bytes for a message."""
    return f"{num_bytes / 2**30:.2f} GiB"
