"""How a flat batch of tokens divides into requests, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Most padded cache positions that one gather of decode rows may copy. Bounds the memory of a
# step: at 8 heads of 128 in float32 this is 512 MiB for K and V together.
MAX_GATHERED_POSITIONS = 1 << 16


@dataclass(frozen=True)
class DecodeGroup:
    """Requests with one query token each, and about as long as each other.

    Attributes:
        tokens: ``[num_rows]`` int64, index of each row's query in the flat batch.
        blocks: ``[num_rows, num_blocks]`` int64, block ids; short rows repeat their first.
        mask: ``[num_rows, 1, 1, num_blocks * block_size]`` bool, True where a key counts.
    """

    tokens: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch, on the device, with the lengths on the host as well.

    The host's copies let a kernel choose its launch without waiting for the device.

    Attributes:
        query_start_loc: ``[num_reqs + 1]`` int32, where each request's tokens start.
        seq_lens: ``[num_reqs]`` int32, tokens of each request after this step:
            cached context and new ones.
        block_tables: ``[num_reqs, max_blocks]`` int32, block ids in order; what lies
            beyond a request's length is not read.
        slot_mapping: ``[num_tokens]`` int32, cache slot of each token, -1 for none.
        host_query_start_loc: The same numbers as ``query_start_loc``.
        host_seq_lens: The same numbers as ``seq_lens``.
        block_size: Tokens in a block.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    host_query_start_loc: Sequence[int]
    host_seq_lens: Sequence[int]
    block_size: int

    @cached_property
    def plans(self) -> dict[Hashable, object]:
        """What kernels work out of this batch once for all layers, by a key of their own."""
        return {}

    def query_len(self, row: int) -> int:
        """Tokens that this step computes for one request."""
        return self.host_query_start_loc[row + 1] - self.host_query_start_loc[row]

    @cached_property
    def prefill_rows(self) -> list[int]:
        """Requests with more than one query token."""
        return [row for row in range(len(self.host_seq_lens)) if self.query_len(row) > 1]

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Requests with one query token, in groups that pad little.

        Computed once for all layers of a step.
        """
        rows = [row for row in range(len(self.host_seq_lens)) if self.query_len(row) == 1]
        rows.sort(key=lambda row: self.host_seq_lens[row], reverse=True)
        groups: list[list[int]] = []
        for row in rows:
            if groups and self._fits(row, groups[-1]):
                groups[-1].append(row)
            else:
                groups.append([row])
        return [self._decode_group(group) for group in groups]

    def _fits(self, row: int, group: list[int]) -> bool:
        longest = self.host_seq_lens[group[0]]
        # Lengths within a factor of two bound the padding to half of what is gathered;
        # below 256 positions one gather more costs more than the padding.
        close = longest <= max(2 * self.host_seq_lens[row], 256)
        return close and longest * (len(group) + 1) <= MAX_GATHERED_POSITIONS

    def _decode_group(self, rows: list[int]) -> DecodeGroup:
        device = self.block_tables.device
        num_blocks = -(-self.host_seq_lens[rows[0]] // self.block_size)
        index = torch.tensor(rows, device=device)
        blocks = self.block_tables[index, :num_blocks].long()
        positions = torch.arange(num_blocks * self.block_size, device=device)
        mask = positions < self.seq_lens[index].unsqueeze(1)  # [num_rows, num_positions]
        # A short row reads its own first block where it has none, so that no other
        # request's numbers come near it.
        unused = ~mask[:, :: self.block_size]
        blocks = torch.where(unused, blocks[:, :1], blocks)
        return DecodeGroup(self.query_start_loc[index].long(), blocks, mask[:, None, None, :])
