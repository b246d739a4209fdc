"""Choose the next token of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.dispatch import use_cpu, use_triton
from octavo_kernels.filter_logits import filter_logits
from octavo_kernels.row_scratch import row_scratch, run_rows
from octavo_kernels.sample_noise import sample_noise

sample_rows = Kernel("sampling.sample_rows", "q")


@dataclass(frozen=True)
class SamplingMetadata:
    """How each row wants its token chosen. On the host: it decides what is launched.

    Attributes:
        temperature: ``[num_rows]`` float32; 0 takes the likeliest token.
        top_k: ``[num_rows]`` int32; 0 is off.
        top_p: ``[num_rows]`` float32; 1 is off.
        min_p: ``[num_rows]`` float32; 0 is off.
        seeds: ``[num_rows]`` int64.
        positions: ``[num_rows]`` int64, index in its sequence of the token to be sampled.
        on_device: What `packed` returns, if it was copied to the GPU already.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    positions: NDArray[np.int64]
    on_device: Tensor | None = None

    def packed(self) -> NDArray[np.int64]:
        """Put all that the GPU's kernel reads into ``[6, num_rows]``, for one copy."""
        packed = np.empty((6, len(self.positions)), np.int64)
        for index, numbers in enumerate((self.temperature, self.top_p, _log_min_p(self))):
            packed[index] = np.ascontiguousarray(numbers, np.float32).view(np.int32)
        packed[3:] = self.top_k, self.seeds, self.positions
        return packed


def sample(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Sample one token for each row.

    A row's token depends on its own logits and parameters only, bit for bit. Which tokens may
    be sampled is what `filter_logits` says, and the noise is that of `sample_noise`.

    Args:
        logits: ``[num_rows, vocab_size]`` float32.
        metadata: One entry for each row.

    Returns:
        ``[num_rows]`` int64 token ids, on the device of `logits`.
    """
    if use_triton(logits):
        from octavo_kernels import triton

        return triton.sample(logits, metadata)
    if use_cpu(logits) and logits.dtype == torch.float32 and logits.shape[-1] > 0:
        return _sample_on_cpu(logits, metadata)
    return sample_reference(logits, metadata)


def _sample_on_cpu(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    num_rows, vocab_size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int64)
    parameters: list[NDArray[Any]] = [
        np.ascontiguousarray(metadata.temperature, np.float32),
        np.ascontiguousarray(metadata.top_k, np.int32),
        np.ascontiguousarray(metadata.top_p, np.float32),
        _log_min_p(metadata),
        np.ascontiguousarray(metadata.seeds, np.int64),
        np.ascontiguousarray(metadata.positions, np.int64),
    ]
    scratch = row_scratch(vocab_size)
    words = torch.tensor(
        [
            *(logits.data_ptr(), 4 * logits.stride(0), num_rows, vocab_size, tokens.data_ptr()),
            *(array.ctypes.data for array in parameters),
            *(scratch.data_ptr(), scratch.stride(0)),
        ]
    )
    run_rows(sample_rows, num_rows, words)
    return tokens


def _log_min_p(metadata: SamplingMetadata) -> NDArray[np.float32]:
    """Take logarithms in float64, as the twin does; of 0 that is minus infinity, and off."""
    with np.errstate(divide="ignore"):
        return np.log(metadata.min_p.astype(np.float64)).astype(np.float32)


def sample_reference(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Do the same in plain torch.

    Row by row, since vector code may round the end of an array differently.
    """
    token_ids = logits.argmax(dim=-1)
    random_rows = np.flatnonzero(metadata.temperature > 0).tolist()
    if not random_rows:
        return token_ids
    vocabulary = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    seeds = torch.from_numpy(metadata.seeds).to(logits.device)
    positions = torch.from_numpy(metadata.positions).to(logits.device)
    for row in random_rows:
        scaled = filter_logits(
            logits[row] / float(metadata.temperature[row]),
            top_k=int(metadata.top_k[row]),
            top_p=float(metadata.top_p[row]),
            min_p=float(metadata.min_p[row]),
        )
        noise = sample_noise(seeds[row : row + 1], positions[row : row + 1], vocabulary)
        token_ids[row] = (scaled + noise[0]).argmax()
    return token_ids
