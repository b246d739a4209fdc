"""Gives requests their KV blocks, and finds prompts that start alike."""

from __future__ import annotations

from octavo_core.block_hash import extend_block_hashes
from octavo_core.block_pool import BlockPool
from octavo_core.request import Request


class BlockManager:
    """Maps each request's tokens to blocks of one pool.

    Full blocks are registered with the prefix cache when the step that fills them is
    scheduled, not when it is done: attention reads the cache after the whole batch has
    written to it, so requests that arrive together share a cold prefix in the very
    step that computes it. If that step fails, `forget` takes the registration back.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        enable_prefix_caching: False makes every lookup a miss.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.num_prefix_queries = 0  # tokens
        self.num_prefix_hits = 0  # tokens
        self._enable_prefix_caching = enable_prefix_caching
        # Kept back at admission while others run, so that they can grow a little before
        # somebody has to be preempted.
        self._watermark_blocks = num_blocks // 100

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Return the blocks that hold the longest known prefix of a request.

        At least one token is left to compute, since its logits are needed.
        """
        if not self._enable_prefix_caching:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        extend_block_hashes(request, self.block_size, max_blocks)
        block_ids = []
        for block_hash in request.block_hashes[:max_blocks]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def admit(
        self, request: Request, cached_block_ids: list[int], num_tokens: int, *, others_run: bool
    ) -> bool:
        """Give a waiting request its cached prefix and room for its first step.

        Admission needs room for everything the request has so far, even if the step takes
        only a part, so that two long prompts don't preempt each other half-way.

        Args:
            cached_block_ids: What `find_cached_prefix` returned.
            num_tokens: Tokens that must have room after this step.
            others_run: True keeps a few blocks back for those that run.

        Returns:
            False if there is not enough room; nothing has changed then.
        """
        pool = self.pool
        num_taken = sum(pool.ref_count(block_id) == 0 for block_id in cached_block_ids)
        num_new = self.num_blocks_for(request.num_tokens) - len(cached_block_ids)
        reserve = self._watermark_blocks if others_run else 0
        if num_taken + num_new + reserve > pool.num_free:
            return False
        pool.touch(cached_block_ids)
        request.block_ids = list(cached_block_ids)
        request.num_registered_blocks = len(cached_block_ids)
        request.block_ids += pool.allocate(self.num_blocks_for(num_tokens) - len(request.block_ids))
        if self._enable_prefix_caching and request.num_preemptions == 0:
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += len(cached_block_ids) * self.block_size
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for a running request's first `num_tokens` tokens.

        Returns:
            The block ids that were added, or None if the pool has not enough.
        """
        count = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if count <= 0:
            return []
        if count > self.pool.num_free:
            return None
        block_ids = self.pool.allocate(count)
        request.block_ids += block_ids
        return block_ids

    def register_full_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Tell the prefix cache of the blocks that are full once `num_tokens` are computed.

        Returns:
            The blocks that became findable, for `forget`.
        """
        num_full = num_tokens // self.block_size
        if not self._enable_prefix_caching or num_full <= request.num_registered_blocks:
            return []
        extend_block_hashes(request, self.block_size, num_full)
        registered = []
        for index in range(request.num_registered_blocks, num_full):
            block_id = request.block_ids[index]
            if self.pool.register(block_id, request.block_hashes[index]):
                registered.append(block_id)
        request.num_registered_blocks = num_full
        return registered

    def free(self, request: Request) -> None:
        """Let go of all blocks of a request. Full ones stay findable until they are evicted."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered_blocks = 0

    def forget(self, block_ids: list[int]) -> None:
        """Take back registrations of a step that failed."""
        self.pool.forget(block_ids)
