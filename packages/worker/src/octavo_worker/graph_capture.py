"""Decode steps as captured graphs: what a step launches is recorded once for each batch size.

A decode of a small model is hundreds of kernels of some microseconds each, and launching them
from Python takes longer than they do. A batch is padded to the next size that was captured; the
rows that pad it write nothing and are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from octavo_core.config import EngineConfig
from octavo_core.executor import ProgressCallback
from octavo_kernels import AttentionMetadata
from octavo_kernels.dispatch import triton_runs
from octavo_worker.models import KVCache, Model

STAGE = "capturing graphs"

_MAX_SIZE = 512
"""Rows from which on the kernels take longer than their launches."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: padding is at most 7 rows, or 15 above 256."""
    largest = min(max_num_seqs, _MAX_SIZE)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, _MAX_SIZE + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


def captures_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are to be captured.

    Not on CPUs, where all layers are one call; not with several workers, which talk to each
    other within a step; not if layers are fetched from the host; and not where torch twins stand
    in for kernels, for they look at lengths and at chosen experts on the host.
    """
    return (
        device.type == "cuda"
        and not config.model.enforce_eager
        and config.parallel.world_size == 1
        and not config.device.cpu_offload_gb
        and triton_runs()
    )


class Graph(Protocol):
    """Work on a device that was recorded."""

    def replay(self) -> None:
        """Do it again, on the same memory."""
        ...


class GraphMaker(Protocol):
    """Records work."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Record what `run` does.

        Returns:
            The graph, and the tensor that holds the result after each replay.
        """
        ...


class CudaGraphMaker:
    """Records CUDA graphs, which share the memory of what they compute in between."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Record `run`, after a call that compiles its kernels."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has none for it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return graph, output


@dataclass
class _Inputs:
    """Memory that graphs read a step from.

    Attributes:
        input_ids: ``[max_size]`` int32.
        positions: ``[max_size]`` int32.
        query_start_loc: ``[max_size + 1]`` int32, always 0, 1, 2 and so on.
        seq_lens: ``[max_size]`` int32.
        slot_mappings: ``[max_size]`` int32 of each group, -1 for rows that pad.
        block_tables: ``[max_size, max_blocks]`` int32 of each group.
        host_seq_lens: The same as ``seq_lens``; graphs don't see it.
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mappings: list[Tensor]
    block_tables: list[Tensor]
    host_seq_lens: list[int] = field(default_factory=list)

    @classmethod
    def allocate(
        cls, max_size: int, max_blocks: int, num_groups: int, device: torch.device
    ) -> _Inputs:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            zeros(max_size),
            zeros(max_size),
            torch.arange(max_size + 1, dtype=torch.int32, device=device),
            torch.ones(max_size, dtype=torch.int32, device=device),
            [torch.full_like(zeros(max_size), -1) for _ in range(num_groups)],
            [zeros(max_size, max_blocks) for _ in range(num_groups)],
        )

    def fill(
        self, size: int, input_ids: Tensor, positions: Tensor, groups: Sequence[AttentionMetadata]
    ) -> None:
        """Copy a step in, and let the rows up to `size` pad it: one token that nobody keeps."""
        count = len(input_ids)
        self.input_ids[:count] = input_ids
        self.positions[:count] = positions
        self.seq_lens[:count] = groups[0].seq_lens
        self.seq_lens[count:size] = 1
        self.positions[count:size] = 0
        for mapping, table, group in zip(
            self.slot_mappings, self.block_tables, groups, strict=True
        ):
            mapping[:count] = group.slot_mapping
            mapping[count:size] = -1
            table[:count, : group.block_tables.shape[1]] = group.block_tables
            table[count:size, 0] = 0
        self.host_seq_lens = [*groups[0].host_seq_lens, *[1] * (size - count)]

    def metadata(self, size: int, block_size: int) -> list[AttentionMetadata]:
        """Describe the first `size` rows, for each group."""
        return [
            AttentionMetadata(
                query_start_loc=self.query_start_loc[: size + 1],
                seq_lens=self.seq_lens[:size],
                block_tables=table[:size],
                slot_mapping=mapping[:size],
                host_query_start_loc=range(size + 1),
                host_seq_lens=self.host_seq_lens,
                block_size=block_size,
            )
            for mapping, table in zip(self.slot_mappings, self.block_tables, strict=True)
        ]


class GraphedModel:
    """A model whose decode steps are replayed once they are captured; others run as they are.

    Args:
        model: The model.
        group_of_layer: Which block table each layer has.
        max_num_seqs: Most rows of a step.
        max_blocks: Most blocks of a request.
        block_size: Tokens of a block.
        device: Where the model is.
        maker: Records graphs.
    """

    def __init__(
        self,
        model: Model,
        group_of_layer: Sequence[int],
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        maker: GraphMaker,
    ) -> None:
        self._model = model
        self._group_of_layer = group_of_layer
        self._block_size = block_size
        self._sizes = capture_sizes(max_num_seqs)
        num_groups = max(group_of_layer, default=0) + 1
        self._inputs = _Inputs.allocate(self._sizes[-1], max_blocks, num_groups, device)
        self._maker = maker
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}
        self._kv_caches: Sequence[KVCache] = ()

    @torch.inference_mode()
    def capture(self, kv_caches: Sequence[KVCache], on_progress: ProgressCallback) -> None:
        """Record a decode step of each size over a cache; the largest first, for its memory.

        Args:
            kv_caches: Those that steps will run over. Nothing is written to them.
            on_progress: Told about the share of sizes that is there.
        """
        self._kv_caches = kv_caches
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(STAGE, done / len(self._sizes))
            self._inputs.seq_lens.fill_(1)
            self._inputs.host_seq_lens = [1] * size
            for mapping in self._inputs.slot_mappings:
                mapping.fill_(-1)
            self._graphs[size] = self._maker.capture(partial(self._run, size))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, hidden_size]``; see `Model`."""
        count = len(input_ids)
        is_decode = metadata[0].query_start_loc.shape[0] == count + 1
        if not is_decode or count > self._sizes[-1] or kv_caches is not self._kv_caches:
            return self._model.forward(input_ids, positions, kv_caches, metadata)
        size = next(size for size in self._sizes if size >= count)
        groups = [
            metadata[self._group_of_layer.index(group)]
            for group in range(len(self._inputs.block_tables))
        ]
        self._inputs.fill(size, input_ids, positions, groups)
        graph, output = self._graphs[size]
        graph.replay()
        return output[:count].clone()  # the next step may begin before this one is sampled

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32."""
        return self._model.compute_logits(hidden_states)

    def _run(self, size: int) -> Tensor:
        """Compute the first rows of the inputs."""
        groups = self._inputs.metadata(size, self._block_size)
        return self._model.forward(
            self._inputs.input_ids[:size],
            self._inputs.positions[:size],
            self._kv_caches,
            [groups[group] for group in self._group_of_layer],
        )
