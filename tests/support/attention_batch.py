"""Random batches over a paged cache, for tests of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import AttentionMetadata


def make_metadata(
    lens: list[tuple[int, int]], block_tables: Tensor, block_size: int
) -> AttentionMetadata:
    """Build the metadata of (query length, sequence length) pairs."""
    starts = [0]
    for query_len, _ in lens:
        starts.append(starts[-1] + query_len)
    seq_lens = [seq_len for _, seq_len in lens]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=block_tables,
        slot_mapping=torch.full((starts[-1],), -1, dtype=torch.int32),
        host_query_start_loc=starts,
        host_seq_lens=seq_lens,
        block_size=block_size,
    )


def make_block_tables(seq_lens: list[int], block_size: int, spare: int = 3) -> tuple[Tensor, int]:
    """Deal shuffled blocks out; return the tables and the number of blocks there are."""
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_of) + spare
    shuffled = torch.randperm(num_blocks).tolist()
    # What lies beyond a request's blocks would be far out of bounds.
    tables = torch.full((len(seq_lens), max(blocks_of, default=0) + 1), 10**6, dtype=torch.int32)
    for row, count in enumerate(blocks_of):
        tables[row, :count] = torch.tensor([shuffled.pop() for _ in range(count)])
    return tables, num_blocks


def written_out(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as its definition says, token by token and head by head, in float64."""
    output = torch.zeros(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    starts = metadata.host_query_start_loc
    for row, seq_len in enumerate(metadata.host_seq_lens):
        query_len = starts[row + 1] - starts[row]
        for index in range(query_len):
            length = seq_len - query_len + index + 1
            at = torch.arange(0 if window is None else max(length - window, 0), length)
            blocks = metadata.block_tables[row].long()[at // metadata.block_size]
            for head in range(query.shape[1]):
                k = keys[blocks, head // group, at % metadata.block_size].double()
                v = values[blocks, head // group, at % metadata.block_size].double()
                scores = k @ query[starts[row] + index, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head].double().view(1)))
                    v = torch.cat((v, torch.zeros(1, v.shape[-1], dtype=torch.float64)))
                output[starts[row] + index, head] = scores.softmax(0) @ v
    return output
