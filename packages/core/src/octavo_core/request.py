"""A request as the scheduler sees it."""

from __future__ import annotations

import enum

from octavo_core.grammar import GrammarMatcher
from octavo_core.wire import EngineCoreRequest, TokenLogprobs


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. Everything after PREEMPTED is an end."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        """True once the request has ended, in whichever way."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        """The word that the API reports, or None while the request lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """One answer in the making.

    Attributes:
        token_ids: Prompt and answer so far.
        num_computed_tokens: How many of them have K and V in the cache, those of
            steps in flight included: it can be ahead of the known tokens.
        num_awaited_tokens: Tokens that steps in flight still sample for it after it lost
            its slot. Only then it may come back.
        is_decoding: All its known tokens are computed or in flight; each step adds one.
        decode_limit: Position up to which it decodes without asking the block manager.
        slot: Batch slot while it runs, else -1.
        block_tables: For each KV group the blocks it holds, in order. This and the next
            four are the block manager's.
        num_holes: For each group, how many blocks at the start were given back.
        capacity: Tokens that have room in its blocks.
        num_registered_blocks: How many full blocks the prefix cache was told of.
        block_hashes: Hashes of its full blocks, as far as they were needed.
        may_cache: False once the cache was reset while it ran: its blocks are stale.
        num_cached_tokens: Prompt tokens found in the prefix cache when it first ran.
        prompt_logprobs: Of its prompt tokens from the second on, as far as they are known
            and not told yet; None if nobody asked, or they were told.
        scheduled_time: When it first ran, in seconds since the epoch; 0 before.
        plain_until: Up to this many tokens, one more that ends nothing is appended and told,
            and that is all: it runs, is under no grammar, and has told what `report_due` means.
        report_due: Its next output tells when it was scheduled and how often preempted.
        max_total_tokens: Prompt and answer end here at the latest.
        matcher: Follows the answer's known tokens through a grammar, under structured output.
        pooling_params: What is made of the prompt, if that is no answer.
        num_untold_tokens: How many of the last tokens were forced by the grammar since the
            worker heard of it last.
    """

    __slots__ = (
        "adapter",
        "arrival_time",
        "block_hashes",
        "block_tables",
        "cache_salt",
        "capacity",
        "deadline",
        "decode_limit",
        "is_decoding",
        "matcher",
        "max_total_tokens",
        "may_cache",
        "media",
        "min_total_tokens",
        "num_awaited_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_holes",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_untold_tokens",
        "plain_until",
        "pooling_params",
        "priority",
        "prompt_logprobs",
        "report_due",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        max_model_len: int,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.sampling_params = params
        self.pooling_params = request.pooling_params
        self.arrival_time = request.arrival_time
        self.priority = request.priority
        self.tenant = request.tenant
        self.deadline = request.deadline
        self.cache_salt = request.cache_salt
        self.adapter = request.adapter
        self.media = request.media
        self.token_ids = request.prompt_token_ids + request.output_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.scheduled_time = 0.0
        self.report_due = False
        self.plain_until = 0
        self.num_registered_blocks = 0
        self.num_awaited_tokens = 0
        self.num_untold_tokens = 0
        self.matcher = matcher
        self.is_decoding = False
        self.decode_limit = 0
        self.slot = -1
        self.block_tables: list[list[int]] = []
        self.num_holes: list[int] = []
        self.capacity = 0
        self.block_hashes: list[bytes] = []
        self.may_cache = True
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        wants_prompt = params.prompt_logprobs is not None and not request.output_token_ids
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt else None
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= frozenset(params.eos_token_ids)
        max_tokens = params.max_tokens if params.max_tokens is not None else max_model_len
        self.max_total_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        if request.pooling_params is not None:
            # One step after the last token of the text there is nothing to schedule.
            self.max_total_tokens = self.num_prompt_tokens + 1
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """True once the request has ended."""
        return self.status > RequestStatus.PREEMPTED

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Return what there is to tell about the prompt, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def ends_with(self, token_id: int) -> bool:
        """Return True if the request ends with `token_id`, which was just appended.

        Sets ``status`` and ``stop_reason`` when it does. The order is the one users of
        vLLM know: end of sequence, stop token, length. A stop counts only from
        ``min_tokens`` on.
        """
        num_tokens = len(self.token_ids)
        if token_id in self.stop_ids and num_tokens >= self.min_total_tokens:
            self.status = RequestStatus.FINISHED_STOPPED
            params = self.sampling_params
            if params.ignore_eos or token_id not in params.eos_token_ids:
                self.stop_reason = token_id
            return True
        if num_tokens >= self.max_total_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False
