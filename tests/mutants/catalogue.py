"""Bugs to plant: what somebody could get wrong in the scheduler and below it.

Each is one edit of one file of ``octavo_core``. Its old text has to be there once; when the
code has moved on, the mutation has to move along. Edits that change nothing that anybody
could notice (a faster order, another message) do not belong here.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        file: Path in ``octavo_core``.
        breaks: What goes wrong, in a few words; also its name.
    """

    file: str
    breaks: str
    old: str
    new: str


SCHEDULER = [
    Mutant(
        "scheduler.py",
        "a request is admitted when no budget is left",
        "while step.budget > 0 and self._free_slots and len(policy):",
        "while step.budget >= 0 and self._free_slots and len(policy):",
    ),
    Mutant(
        "step.py",
        "a prefill is not taken off the budget",
        "        self.budget -= num_tokens\n        end",
        "        end",
    ),
    Mutant(
        "scheduler.py",
        "decodes are not taken off the budget",
        "step.budget -= len(requests)",
        "pass",
    ),
    Mutant(
        "scheduler.py",
        "a chunk of a prefill ignores what is left of the budget",
        "return min(num_tokens, step.budget, limit)",
        "return min(num_tokens, limit)",
    ),
    Mutant(
        "scheduler.py",
        "a long prompt takes the whole budget in spite of the threshold",
        "limit = self._long_prefill_token_threshold or self._max_num_batched_tokens",
        "limit = self._max_num_batched_tokens",
    ),
    Mutant(
        "scheduler.py",
        "a long prompt leaves nothing of the budget to those that could start",
        "            limit = -(-self._max_num_batched_tokens // 2)\n",
        "            pass\n",
    ),
    Mutant(
        "scheduler.py",
        "a long prompt takes half of the budget though nobody else can start",
        " and not self._head_is_blocked",
        "",
    ),
    Mutant(
        "scheduler.py",
        "a prefill is scheduled before decodes",
        "for is_decoding in (True, False):",
        "for is_decoding in (False, True):",
    ),
    Mutant(
        "scheduler.py",
        "a freed slot is not told to the workers",
        "self._slots_to_tell.append(request.slot)",
        "pass",
    ),
    Mutant(
        "scheduler.py",
        "a freed slot is never given out again",
        "self._free_slots.append(request.slot)",
        "pass",
    ),
    Mutant(
        "scheduler.py",
        "the last token is decoded twice with steps ahead",
        "elif start < request.max_total_tokens - 1:",
        "elif start < request.max_total_tokens:",
    ),
    Mutant(
        "request.py",
        "an answer is one token too long",
        "if num_tokens >= self.max_total_tokens:",
        "if num_tokens > self.max_total_tokens:",
    ),
    Mutant(
        "scheduler.py",
        "an answer's limit is not looked at once its first token was told",
        "request.plain_until = request.max_total_tokens - 1",
        "request.plain_until = request.max_total_tokens",
    ),
    Mutant(
        "scheduler.py",
        "a preempted request's awaited token is taken for a running one's",
        "        request.plain_until = 0\n",
        "",
    ),
    Mutant(
        "scheduler.py",
        "decodes beyond the budget count as computed",
        "            request.num_computed_tokens -= 1\n",
        "            pass\n",
    ),
    Mutant(
        "scheduler.py",
        "a preempted request that comes back is taken for one that decodes",
        "        request.decode_limit = 0\n",
        "",
    ),
    Mutant(
        "scheduler.py",
        "a preempted request does not wait for its tokens in flight",
        "request.num_awaited_tokens = max(0, num_awaited)",
        "pass",
    ),
    Mutant(
        "scheduler.py",
        "the step after a preemption admits new requests at once",
        "if not step.has_preempted:\n                self._admit_waiting(step)",
        "self._admit_waiting(step)",
    ),
    Mutant(
        "scheduler.py",
        "a victim stays in the step it was scheduled in",
        "        step.take_back(request)\n",
        "",
    ),
    Mutant(
        "scheduler.py",
        "a victim leaves blocks findable that nobody computes",
        "        self.blocks.retract(request)\n",
        "",
    ),
    Mutant(
        "scheduler.py",
        "an aborted request keeps its blocks",
        "        self.blocks.free(request)\n        self._free_slots",
        "        self._free_slots",
    ),
    Mutant(
        "scheduler.py",
        "a waiting request that is aborted stays in line",
        "        self._policy.remove(request)\n        self._num_queued_tokens",
        "        self._num_queued_tokens",
    ),
    Mutant(
        "scheduler.py",
        "the policy is not told of the end",
        "            self._policy.finish(request)\n",
        "",
    ),
    Mutant(
        "scheduler.py",
        "admission forgets what waits in tokens",
        "        self._num_queued_tokens -= len(request.token_ids)\n        self._running.append",
        "        self._running.append",
    ),
    Mutant(
        "scheduler.py",
        "blocks of a failed step stay findable",
        "            self.blocks.forget(step.effects)\n",
        "            pass\n",
    ),
    Mutant(
        "scheduler.py",
        "only the failed step is taken back, not those after it",
        "steps, self._in_flight = self._in_flight, deque()",
        "steps = [self._in_flight.popleft()]",
    ),
    Mutant(
        "scheduler.py",
        "slots of a failed step are not told again",
        "untold = set(self._slots_to_tell).union(*(step.freed_slots for step in steps))",
        "untold = set(self._slots_to_tell)",
    ),
    Mutant(
        "scheduler.py",
        "a running request may be found by others after the cache was reset",
        "            request.may_cache = False\n",
        "            pass\n",
    ),
    Mutant(
        "scheduler.py",
        "an earlier request's deadline ends the next one of its name",
        "if request is None or request.deadline != deadline:",
        "if request is None:",
    ),
    Mutant(
        "admission.py",
        "a request that can never fit is admitted",
        "if blocks.most_blocks_held(request.max_total_tokens) > blocks.pool.num_blocks:",
        "if blocks.most_blocks_held(request.num_tokens) > blocks.pool.num_blocks:",
    ),
    Mutant(
        "scheduler.py",
        "the line is one request longer than it may be",
        "if len(self._requests) >= self._max_num_queued_reqs:",
        "if len(self._requests) > self._max_num_queued_reqs:",
    ),
    Mutant(
        "bisection.py",
        "half of the suspects go free",
        "        self._add(on_trial[half:])\n",
        "",
    ),
    Mutant(
        "bisection.py",
        "a request is cleared one token too early",
        "len(self.request.token_ids) > self.num_tokens",
        "len(self.request.token_ids) >= self.num_tokens",
    ),
    Mutant(
        "bisection.py",
        "the first of several suspects is failed",
        "if len(on_trial) == 1:",
        "if len(on_trial) <= 2:",
    ),
    Mutant(
        "request.py",
        "a stop token counts before min_tokens",
        "if token_id in self.stop_ids and num_tokens >= self.min_total_tokens:",
        "if token_id in self.stop_ids:",
    ),
]

BLOCKS = [
    Mutant(
        "block_manager.py",
        "the whole prompt may come from the cache, with nothing left to compute",
        "num_blocks = (len(request.token_ids) - 1) // self.block_size",
        "num_blocks = len(request.token_ids) // self.block_size",
    ),
    Mutant(
        "block_manager.py",
        "a lookup jumps over a block that is missing",
        "                    return index\n            return limit",
        "                    continue\n            return limit",
    ),
    Mutant(
        "block_manager.py",
        "a hit behind a window lacks its oldest block",
        "needed = self.num_blocks_for(window - 1)",
        "needed = (window - 1) // self.block_size",
    ),
    Mutant(
        "block_manager.py",
        "a window gives a block back while it is still seen",
        "return max(0, position - group.window + 1) // self.block_size",
        "return max(0, position - group.window + 1 + self.block_size) // self.block_size",
    ),
    Mutant(
        "block_manager.py",
        "cached blocks are adopted without a count",
        "            self.pool.touch(ids)\n",
        "            pass\n",
    ),
    Mutant(
        "block_manager.py",
        "admission forgets that idle hits are taken off the free list",
        "if num_idle + max(num_new, num_allocated) + reserve > self.pool.num_free:",
        "if max(num_new, num_allocated) + reserve > self.pool.num_free:",
    ),
    Mutant(
        "block_manager.py",
        "who was refused once is refused for ever",
        "            and self.pool.num_free <= last.num_free\n",
        "",
    ),
    Mutant(
        "block_manager.py",
        "a refusal stands although the block that was missing has come",
        "            and not (last.missing_key is not None and self._is_known(last.missing_key))\n",
        "",
    ),
    Mutant(
        "block_manager.py",
        "a refusal is taken for that of another request",
        "            and last.request is request\n",
        "",
    ),
    Mutant(
        "block_manager.py",
        "admission keeps nothing back for those that run",
        "reserve = self._watermark_blocks if others_run else 0",
        "reserve = 0",
    ),
    Mutant(
        "block_manager.py",
        "admission makes room for the first chunk only",
        "if num_idle + max(num_new, num_allocated) + reserve > self.pool.num_free:",
        "if num_idle + num_allocated + reserve > self.pool.num_free:",
    ),
    Mutant(
        "block_manager.py",
        "blocks are counted rounded down",
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size",
    ),
    Mutant(
        "block_manager.py",
        "a block is registered one token before it is full",
        "num_full = known // self.block_size\n        first",
        "num_full = (known + 1) // self.block_size\n        first",
    ),
    Mutant(
        "block_manager.py",
        "blocks whose tokens are not known yet are registered",
        "known = min(request.num_computed_tokens, len(request.token_ids))",
        "known = request.num_computed_tokens",
    ),
    Mutant(
        "block_manager.py",
        "the groups of a model share their keys",
        "return block_hash + bytes([group_index]) if group_index else block_hash",
        "return block_hash",
    ),
    Mutant(
        "block_manager.py",
        "a request's prefix is evicted before its tail",
        "self.pool.free(reversed(table[num_holes:]))",
        "self.pool.free(table[num_holes:])",
    ),
    Mutant(
        "block_manager.py",
        "a reset leaves the host's copies",
        "        self.host.clear()\n",
        "",
    ),
    Mutant(
        "block_manager.py",
        "a copy that a failed step never made is believed",
        "self._record_removed(self.host.forget(effects.stored_keys), HOST)",
        "pass",
    ),
    Mutant(
        "block_manager.py",
        "what a step copies in may be overwritten by what it copies out",
        "        self._pin_host_hits(request, prefix)\n",
        "",
    ),
    Mutant(
        "block_manager.py",
        "an evicted block is not copied out",
        "            self._effects.swap_out.append((block_id, host_id))\n",
        "            pass\n",
    ),
    Mutant(
        "block_pool.py",
        "an evicted block is still found",
        "                self._drop_key(block_id)\n                evicted",
        "                evicted",
    ),
    Mutant(
        "block_pool.py",
        "an idle block that is hit stays on the free list",
        "                del self._free[block_id]\n",
        "                pass\n",
    ),
    Mutant(
        "block_pool.py",
        "a block that several hold is freed with the first",
        "            if self._ref_counts[block_id] == 0:\n                self._free",
        "            if self._ref_counts[block_id] <= 1:\n                self._free",
    ),
    Mutant(
        "block_pool.py",
        "the newest block is evicted first",
        "block_id, _ = self._free.popitem(last=False)",
        "block_id, _ = self._free.popitem()",
    ),
    Mutant(
        "block_pool.py",
        "of two equal blocks the later one takes the name",
        "        if key in self._by_key:\n            return False\n",
        "",
    ),
    Mutant(
        "block_pool.py",
        "reset leaves the names on the blocks",
        "        self._keys = [None] * self.num_blocks\n\n    def _drop_key",
        "\n    def _drop_key",
    ),
    Mutant(
        "host_tier.py",
        "what is pinned may go",
        "if old not in self._pinned), None)",
        "if True), None)",
    ),
    Mutant(
        "host_tier.py",
        "two copies share a host block",
        "self._by_key[key] = self._free.pop()",
        "self._by_key[key] = self._free[-1]",
    ),
    Mutant(
        "host_tier.py",
        "a forgotten copy's place is lost",
        "                self._free.append(block_id)\n",
        "",
    ),
    Mutant(
        "host_tier.py",
        "pins are never let go",
        "        self._pinned.clear()\n\n    def forget",
        "        pass\n\n    def forget",
    ),
    Mutant(
        "block_hash.py",
        "a block's name does not depend on those before it",
        "        parent = sha256(message).digest()\n        hashes.append(parent)",
        "        hashes.append(sha256(message).digest())",
    ),
    Mutant(
        "block_hash.py",
        "an adapter and a salt of one name share blocks",
        'keys.append(("cache_salt", request.cache_salt))',
        'keys.append(("adapter", request.cache_salt))',
    ),
    Mutant(
        "block_hash.py",
        "media that begin in an earlier block are overlooked",
        "if span.start < end and start < span.start + span.length:",
        "if start <= span.start < end:",
    ),
]

POLICIES = [
    Mutant(
        "policies/lazy_heap.py",
        "an item keeps its old key, too",
        "while heap and entries.get(heap[0][2]) is not heap[0]:",
        "while heap and heap[0][2] not in entries:",
    ),
    Mutant(
        "policies/lazy_heap.py",
        "entries of removed items pile up",
        "if len(heap) > 2 * len(entries) + 16:",
        "if False:",
    ),
    Mutant(
        "policies/queue_policy.py",
        "a preempted request goes to the end of its class",
        "(self.sort_key(request), is_new, self._arrivals[request])",
        "(self.sort_key(request), self._arrivals[request] + (0 if is_new else 10**9))",
    ),
    Mutant(
        "policies/queue_policy.py",
        "of several equal victims the oldest is taken",
        "(self.sort_key(request), self.arrival(request))",
        "(self.sort_key(request), -self.arrival(request))",
    ),
    Mutant(
        "policies/queue_policy.py",
        "a request that is admitted out of turn is forgotten",
        "        if request.status is not RequestStatus.RUNNING:\n            self.finish(request)",
        "        self.finish(request)",
    ),
    Mutant(
        "policies/priority.py",
        "the oldest gets its turn once less often",
        "% self._promote_every == self._promote_every - 1",
        "% (self._promote_every + 1) == self._promote_every",
    ),
    Mutant(
        "policies/priority.py",
        "a turn out of order promotes nobody",
        "            self._promoted.add(request)\n",
        "            pass\n",
    ),
    Mutant(
        "policies/priority.py",
        "the promoted are not forgotten",
        "        self._promoted.discard(request)\n",
        "",
    ),
    Mutant(
        "policies/fair_share.py",
        "who was idle has saved up",
        "tenant.service = max(tenant.service, self._floor)",
        "pass",
    ),
    Mutant(
        "policies/fair_share.py",
        "who leaves for a moment has no debt any more",
        "idle.key_of(idle.peek()) <= self._floor or",
        "True or",
    ),
    Mutant(
        "policies/fair_share.py",
        "prompts cost nothing",
        "tenant.service += self._input_weight * request.num_prompt_tokens",
        "pass",
    ),
    Mutant(
        "policies/fair_share.py",
        "a prompt is charged again after a preemption",
        "        if is_new:\n            tenant.service",
        "        if True:\n            tenant.service",
    ),
    Mutant(
        "policies/fair_share.py",
        "output tokens are counted when a request ends only",
        "            self._count(tenant)\n            if tenant.service == waiting",
        "            if tenant.service == waiting",
    ),
    Mutant(
        "policies/fair_share.py",
        "the tokens of the last step of a request are not counted",
        "        self._count(tenant)\n        del tenant.running[request]",
        "        del tenant.running[request]",
    ),
    Mutant(
        "policies/fair_share.py",
        "idle tenants are remembered for ever",
        "or len(idle) > self._max_idle_tenants",
        "or False",
    ),
    Mutant(
        "policies/fair_share.py",
        "the floor stays where it was",
        "        self._floor = max(self._floor, tenant.service)\n",
        "",
    ),
]

GRAMMARS = [
    Mutant(
        "scheduler.py",
        "grammar: a request is scheduled before its last token is back",
        "                    if num_known > 0:\n",
        "                    num_known = max(1, num_known)\n                    if True:\n",
    ),
    Mutant(
        "scheduler.py",
        "grammar: forced tokens are computed one by one",
        "min(num_known, step.budget)",
        "1",
    ),
    Mutant(
        "scheduler.py",
        "grammar: forced tokens may exceed the budget",
        "min(num_known, step.budget)",
        "num_known",
    ),
    Mutant(
        "scheduler.py",
        "grammar: forced tokens are told twice after a preemption",
        "        request.num_untold_tokens = 0  # it comes back with all its tokens\n",
        "",
    ),
    Mutant(
        "constrained_decoding.py",
        "grammar: forced tokens are told again in every step",
        "            request.num_untold_tokens = 0\n    return forced",
        "    return forced",
    ),
    Mutant(
        "step.py",
        "grammar: a victim that was scheduled keeps its mask",
        "        if request in self.constrained:\n            self.constrained.remove(request)\n",
        "",
    ),
    Mutant(
        "constrained_decoding.py",
        "grammar: its end is not the answer's",
        "if matcher.is_terminated:",
        "if False:",
    ),
    Mutant(
        "scheduler.py",
        "grammar: forced tokens of a waiting request are not counted in the line",
        "self._num_queued_tokens += len(new_token_ids) - 1",
        "pass",
    ),
    Mutant(
        "scheduler.py",
        "grammar: a decode runs on without the block manager's limit",
        "if request.is_decoding and request.matcher is None:",
        "if request.is_decoding:",
    ),
    Mutant(
        "engine_core.py",
        "grammar: a resumed answer begins anew",
        "if matcher is not None and request.output_token_ids:",
        "if False:",
    ),
    Mutant(
        "engine_core.py",
        "grammar: who leaves while it is compiled is let in",
        "            self._compiling.pop(request_id, None)\n",
        "            pass\n",
    ),
]

MUTANTS = [*SCHEDULER, *BLOCKS, *POLICIES, *GRAMMARS]
