"""Gives requests their KV blocks, and finds prompts that start alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo_core.block_hash import extend_block_hashes
from octavo_core.block_pool import BlockPool
from octavo_core.host_tier import HostTier
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.kv_events import (
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from octavo_core.request import Request

HOLE = -1
"""Stands in a block table where a window has moved on: the block was given back."""

ONE_GROUP = (KVCacheGroup(()),)


class CachedPrefix(NamedTuple):
    """The longest prefix of a request that is computed already.

    Attributes:
        num_tokens: Tokens that need no computing, a multiple of the block size.
        tables: For each group one entry for each block: an id, `HOLE` behind a window, or
            None where the contents lie in the host tier.
    """

    num_tokens: int
    tables: list[list[int | None]]


class StepEffects(NamedTuple):
    """What a step does to the pool and the host tier beside giving blocks to requests.

    Attributes:
        swap_out: Pairs of device block and host block to copy to, before anything else.
        swap_in: Pairs of host block and device block to copy to, after that.
        stored_keys: What the host tier claims to hold once ``swap_out`` is done.
        registered: Blocks that are findable on the promise that the step fills them.
    """

    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    stored_keys: list[bytes]
    registered: list[int]

    @classmethod
    def none(cls) -> StepEffects:
        """Return effects to be filled in."""
        return cls([], [], [], [])


class _Refusal(NamedTuple):
    """Why a request was not admitted.

    Attributes:
        num_free: Free blocks at the time, which were not enough.
        missing_key: The block that would lengthen its cached prefix.
    """

    request: Request
    num_free: int
    others_run: bool
    missing_key: bytes | None


class BlockManager:
    """Maps each request's tokens to blocks of one pool.

    Full blocks are registered with the prefix cache when the step that fills them is
    scheduled, not when it is done: attention reads the cache after the whole batch has
    written to it, so requests that arrive together share a cold prefix in the very
    step that computes it. If that step fails, `forget` takes the registration back.

    A block that is evicted while it is findable is copied to the host tier, if there is
    one, and comes back on a hit. So a preempted request that is resumed, a swapped-out
    one and one that merely starts like another are one mechanism.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens in a block.
        enable_prefix_caching: False makes every lookup a miss.
        groups: Groups of layers, each with its own block table. With none, as for an encoder,
            there are no blocks and everything fits.
        num_host_blocks: Blocks of the host tier.
        max_step_tokens: Most tokens of one request in a step, which bounds what a window
            holds; None means no bound.
        record_events: True keeps `KVEvent` records for `take_events`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        groups: Sequence[KVCacheGroup] = ONE_GROUP,
        num_host_blocks: int = 0,
        max_step_tokens: int | None = None,
        record_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.pool = BlockPool(num_blocks)
        self.host = HostTier(num_host_blocks)
        self.num_prefix_queries = 0  # tokens
        self.num_prefix_hits = 0  # tokens, those from the host tier included
        self.num_host_hits = 0  # tokens
        self._enable_prefix_caching = enable_prefix_caching and bool(groups)
        self._max_step_tokens = max_step_tokens
        self._windowed = [
            index for index, group in enumerate(self.groups) if group.window is not None
        ]
        # Kept back at admission while others run, so that they can grow a little before
        # somebody has to be preempted.
        self._watermark_blocks = num_blocks // 100
        self._effects = StepEffects.none()
        self._refusal: _Refusal | None = None
        self._events: list[KVEvent] | None = [] if record_events else None

    # Sizes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def most_blocks_held(self, num_tokens: int) -> int:
        """Blocks that a request holds at most, over all groups, on its way to `num_tokens`."""
        return sum(self._most_blocks_of(group, num_tokens) for group in self.groups)

    @property
    def num_tokens_alone(self) -> int:
        """The longest request that fits while nothing else runs."""
        low, high = 0, self.pool.num_blocks * self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks_held(middle) <= self.pool.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def _most_blocks_of(self, group: KVCacheGroup, num_tokens: int) -> int:
        blocks = self.num_blocks_for(num_tokens)
        if group.window is None or self._max_step_tokens is None:
            return blocks
        # What the first query of a step still sees, and the step's own tokens; the two ends
        # may lie in the middle of a block.
        return min(blocks, self.num_blocks_for(group.window - 1 + self._max_step_tokens) + 1)

    # The prefix cache

    def find_cached_prefix(self, request: Request) -> CachedPrefix:
        """Find the longest known prefix of a request.

        At least one token is left to compute, since its logits are needed; and all are, where
        the prompt's log-probabilities or a vector of all its tokens were asked for.
        """
        if not self._enable_prefix_caching or _wants_all_tokens(request):
            return CachedPrefix(0, [[] for _ in self.groups])
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        extend_block_hashes(request, self.block_size, num_blocks)
        hashes = request.block_hashes
        # Each group accepts a length or shortens it, until all agree.
        agreed = 0
        while agreed < len(self.groups):
            for index in range(len(self.groups)):
                usable = self._usable_blocks(index, hashes, num_blocks)
                agreed = agreed + 1 if usable == num_blocks else 1
                num_blocks = usable
                if agreed >= len(self.groups):
                    break
        return CachedPrefix(
            num_blocks * self.block_size,
            [self._cached_table(index, hashes, num_blocks) for index in range(len(self.groups))],
        )

    def _usable_blocks(self, group_index: int, hashes: list[bytes], limit: int) -> int:
        """Return the longest prefix, of at most `limit` blocks, that one group has."""
        window = self.groups[group_index].window
        if window is None:
            for index in range(limit):
                if not self._is_known(_key(hashes[index], group_index)):
                    return index
            return limit
        # Right to left: the blocks that the next token still sees have to be there.
        needed = self.num_blocks_for(window - 1)
        length, index = limit, limit - 1
        while length > 0 and index >= max(0, length - needed):
            if not self._is_known(_key(hashes[index], group_index)):
                length = index
            index -= 1
        return length

    def _cached_table(
        self, group_index: int, hashes: list[bytes], num_blocks: int
    ) -> list[int | None]:
        first = self._first_seen(self.groups[group_index], num_blocks * self.block_size)
        lookup = self.pool.lookup
        return [HOLE] * first + [
            lookup(_key(hashes[index], group_index)) for index in range(first, num_blocks)
        ]

    def _is_known(self, key: bytes) -> bool:
        return self.pool.lookup(key) is not None or self.host.lookup(key) is not None

    def _first_seen(self, group: KVCacheGroup, position: int) -> int:
        """Return the first block that a token at `position` or after it attends to."""
        if group.window is None:
            return 0
        return max(0, position - group.window + 1) // self.block_size

    # Requests take and give back blocks

    def admit(
        self, request: Request, prefix: CachedPrefix, num_tokens: int, *, others_run: bool
    ) -> bool:
        """Give a waiting request its cached prefix and room for its first step.

        Admission needs room for everything the request has so far, even if the step takes
        only a part, so that two long prompts don't preempt each other half-way.

        Args:
            prefix: What `find_cached_prefix` returned, with nothing changed since.
            num_tokens: Tokens that must have room after this step.
            others_run: True keeps a few blocks back for those that run.

        Returns:
            False if there is not enough room; nothing has changed then.
        """
        found = [[id_ for id_ in table if id_ is not None and id_ >= 0] for table in prefix.tables]
        num_idle = sum(self.pool.ref_count(id_) == 0 for ids in found for id_ in ids)
        num_new = sum(
            max(0, self._most_blocks_of(group, len(request.token_ids)) - len(ids))
            for group, ids in zip(self.groups, found, strict=True)
        )
        num_now = self.num_blocks_for(num_tokens)
        num_allocated = sum(
            num_now - table.count(HOLE) - len(ids)
            for table, ids in zip(prefix.tables, found, strict=True)
        )
        reserve = self._watermark_blocks if others_run else 0
        if num_idle + max(num_new, num_allocated) + reserve > self.pool.num_free:
            self._refusal = self._refusal_of(request, prefix, others_run)
            return False
        self._refusal = None
        for ids in found:
            self.pool.touch(ids)
        request.num_registered_blocks = prefix.num_tokens // self.block_size
        self._pin_host_hits(request, prefix)
        request.block_tables = [
            self._fill_table(request, index, table, num_now)
            for index, table in enumerate(prefix.tables)
        ]
        request.num_holes = [table.count(HOLE) for table in prefix.tables]
        request.capacity = num_now * self.block_size
        if self._enable_prefix_caching and request.num_preemptions == 0:
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += prefix.num_tokens
        return True

    def is_still_refused(self, request: Request, *, others_run: bool) -> bool:
        """True if `admit` refused this request last, and nothing has changed for the better.

        The head of a line that does not move is asked for at every step, and to look its
        prefix up costs milliseconds if that is long.
        """
        last = self._refusal
        return (
            last is not None
            and last.request is request
            and self.pool.num_free <= last.num_free
            and (others_run or not last.others_run)
            and not (last.missing_key is not None and self._is_known(last.missing_key))
        )

    def _refusal_of(
        self, request: Request, prefix: CachedPrefix, others_run: bool
    ) -> _Refusal | None:
        if len(self.groups) > 1 or self._windowed:
            return None  # more than one block may lengthen the prefix
        index = prefix.num_tokens // self.block_size
        hashes = request.block_hashes
        missing_key = _key(hashes[index], 0) if index < len(hashes) else None
        return _Refusal(request, self.pool.num_free, others_run, missing_key)

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Make room for a running request's first `num_tokens` tokens.

        Returns:
            For each group the block ids that were added, or None if the pool has not enough.
        """
        tables = request.block_tables
        count = -(-num_tokens // self.block_size) - len(tables[0])
        if count <= 0:
            return [[] for _ in tables]
        if self._windowed:
            self._give_back_behind_windows(request)
        if count * len(tables) > self.pool.num_free:
            return None
        added = []
        for table in tables:
            block_ids = self._allocate(count)
            table += block_ids
            added.append(block_ids)
        request.capacity += count * self.block_size
        return added

    def free(self, request: Request) -> None:
        """Let go of all blocks of a request. Full ones stay findable until they are evicted."""
        for table, num_holes in zip(request.block_tables, request.num_holes, strict=True):
            self.pool.free(reversed(table[num_holes:]))
        request.block_tables = []
        request.num_holes = []
        request.capacity = 0
        request.num_registered_blocks = 0

    def _allocate(self, count: int) -> list[int]:
        """Take blocks; those that others may still want go to the host tier."""
        block_ids, evicted = self.pool.allocate(count)
        for block_id, key in evicted:
            self._record_removed([key])
            if self.host.num_blocks:
                self._store_on_host(block_id, key)
        return block_ids

    def _store_on_host(self, block_id: int, key: bytes) -> None:
        host_id, dropped = self.host.store(key)
        if dropped is not None:
            self._record_removed([dropped], HOST)
        if host_id is not None:
            self._effects.swap_out.append((block_id, host_id))
            self._effects.stored_keys.append(key)
            if self._events is not None:
                block_hash, group_index = _split(key)
                self._events.append(
                    BlockStored([block_hash], None, [], self.block_size, None, HOST, group_index)
                )

    def _pin_host_hits(self, request: Request, prefix: CachedPrefix) -> None:
        """Keep the host's copies until this step is made: allocating may push others out."""
        for group_index, table in enumerate(prefix.tables):
            self.host.pin(
                _key(request.block_hashes[index], group_index)
                for index, block_id in enumerate(table)
                if block_id is None
            )

    def _fill_table(
        self, request: Request, group_index: int, cached: list[int | None], num_blocks: int
    ) -> list[int]:
        """Complete a cached table: copies for what lies in the host tier, new blocks at its end."""
        table = []
        for index, block_id in enumerate(cached):
            if block_id is None:
                block_id = self._copy_in(request, index, group_index)
            table.append(block_id)
        return table + self._allocate(num_blocks - len(table))

    def _copy_in(self, request: Request, index: int, group_index: int) -> int:
        key = _key(request.block_hashes[index], group_index)
        host_id = self.host.lookup(key)
        assert host_id is not None, "a pinned host block is gone"
        (block_id,) = self._allocate(1)
        self._effects.swap_in.append((host_id, block_id))
        self._register(request, index, group_index, block_id)
        if group_index == 0:
            self.num_host_hits += self.block_size
        return block_id

    def _give_back_behind_windows(self, request: Request) -> None:
        """Free the blocks that no token from now on attends to.

        Steps in flight may still read them, but run before any that writes to them.
        """
        for group_index in self._windowed:
            table, first = request.block_tables[group_index], request.num_holes[group_index]
            last = self._first_seen(self.groups[group_index], request.num_computed_tokens)
            if last > first:
                self.pool.free(table[first:last])
                table[first:last] = [HOLE] * (last - first)
                request.num_holes[group_index] = last

    # What is findable

    def register_full_blocks(self, request: Request) -> None:
        """Tell the prefix cache of the blocks that are full and whose tokens are known.

        With steps in flight, tokens may count as computed that no one has seen yet; their
        blocks wait until they can be hashed.
        """
        known = min(request.num_computed_tokens, len(request.token_ids))
        num_full = known // self.block_size
        first = request.num_registered_blocks
        if num_full <= first or not self._enable_prefix_caching or not request.may_cache:
            return
        extend_block_hashes(request, self.block_size, num_full)
        for group_index, table in enumerate(request.block_tables):
            for index in range(max(first, request.num_holes[group_index]), num_full):
                self._register(request, index, group_index, table[index])
        request.num_registered_blocks = num_full

    def retract(self, request: Request) -> None:
        """Make unfindable what a request, once dropped from a step, will not compute in it.

        Nobody can have found these blocks: a step that preempts admits no one.
        """
        num_full = request.num_computed_tokens // self.block_size
        for table in request.block_tables:
            lost = table[num_full : request.num_registered_blocks]
            self._record_removed(self.pool.forget(lost))
        request.num_registered_blocks = min(request.num_registered_blocks, num_full)

    def forget(self, effects: StepEffects) -> None:
        """Take back what a step that failed made findable, on the device and on the host."""
        self._record_removed(self.pool.forget(effects.registered))
        self._record_removed(self.host.forget(effects.stored_keys), HOST)

    def reset_prefix_cache(self) -> None:
        """Forget all contents on the device and on the host. Blocks that are held stay held."""
        self.pool.forget_all()
        self.host.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def _register(self, request: Request, index: int, group_index: int, block_id: int) -> None:
        block_hash = request.block_hashes[index]
        if self.pool.register(
            block_id, _key(block_hash, group_index) if group_index else block_hash
        ):
            self._effects.registered.append(block_id)
            if self._events is not None:
                self._record_stored(self._events, request, index, group_index)

    # What a step carries along

    def take_effects(self) -> StepEffects:
        """Return what the requests' comings and goings since the last call have caused."""
        effects, self._effects = self._effects, StepEffects.none()
        self.host.unpin_all()
        return effects

    def take_events(self) -> list[KVEvent]:
        """Return what happened to cached blocks since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def _record_stored(
        self, events: list[KVEvent], request: Request, index: int, group_index: int
    ) -> None:
        hashes, start = request.block_hashes, index * self.block_size
        events.append(
            BlockStored(
                [hashes[index]],
                hashes[index - 1] if index else None,
                request.token_ids[start : start + self.block_size],
                self.block_size,
                request.adapter,
                group=group_index,
            )
        )

    def _record_removed(self, keys: list[bytes], medium: str = DEVICE) -> None:
        if self._events is None:
            return
        for key in keys:
            block_hash, group_index = _split(key)
            self._events.append(BlockRemoved([block_hash], medium, group_index))


def _wants_all_tokens(request: Request) -> bool:
    pooling = request.pooling_params
    return request.prompt_logprobs is not None or (pooling is not None and pooling.needs_all_tokens)


_HASH_BYTES = 32


def _key(block_hash: bytes, group_index: int) -> bytes:
    """Name a block's contents in the pool: the hash, and the group unless it is the first."""
    return block_hash + bytes([group_index]) if group_index else block_hash


def _split(key: bytes) -> tuple[bytes, int]:
    return key[:_HASH_BYTES], key[_HASH_BYTES] if len(key) > _HASH_BYTES else 0
