"""How a layer's weights get from the host to the device while other layers are computed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo_worker.offload_plan import NUM_STAGED


class LayerCopies(Protocol):
    """Buffers on both sides, and copies that run beside the computation.

    Each of the `NUM_STAGED` staging buffers is used like this, again and again: `start`,
    `wait`, compute, `release`.
    """

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return ``[num_bytes]`` uint8 on the host."""
        ...

    def staging_buffer(self, num_bytes: int) -> Tensor:
        """Return ``[num_bytes]`` uint8 on the device."""
        ...

    def start(self, number: int, host: Tensor, staging: Tensor) -> None:
        """Begin to copy to a staging buffer, once what was released of it is computed.

        Args:
            number: Of the staging buffer.
            host: ``[num_bytes]`` uint8.
            staging: The same bytes of the buffer.
        """
        ...

    def wait(self, number: int) -> None:
        """Let the computation that follows wait for the copy to a buffer."""
        ...

    def release(self, number: int) -> None:
        """Say that the computation so far was the last to read what is in a buffer."""
        ...


class CudaCopies:
    """Copies from pinned memory on a stream of their own; nothing waits on the host.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch has no types for what makes these.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied, self._used = _events(), _events()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return ``[num_bytes]`` uint8 of pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def staging_buffer(self, num_bytes: int) -> Tensor:
        """Return ``[num_bytes]`` uint8 on the GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def start(self, number: int, host: Tensor, staging: Tensor) -> None:
        """Queue a copy behind the last computation with the buffer."""
        with torch.cuda.stream(self._stream):
            # An event that was never recorded is not waited for.
            self._stream.wait_event(self._used[number])
            staging.copy_(host, non_blocking=True)
            self._copied[number].record(self._stream)

    def wait(self, number: int) -> None:
        """Let the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[number])

    def release(self, number: int) -> None:
        """Mark this place of the current stream."""
        self._used[number].record(torch.cuda.current_stream(self._device))


def _events() -> list[torch.cuda.Event]:
    # torch has no types for what makes these.
    return [torch.cuda.Event() for _ in range(NUM_STAGED)]  # type: ignore[no-untyped-call]
