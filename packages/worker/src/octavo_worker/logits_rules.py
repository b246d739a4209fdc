"""What requests ask to be done to single logits: kept by slot, applied to the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_core.sampling_params import SamplingParams
from octavo_kernels import TokenEntries, apply_bitmask, apply_penalties, mask_logits

if TYPE_CHECKING:
    from octavo_worker.input_batch import InputBatch

_ANY = -1  # fills a bad word's beginning up to the longest: matches every token
_NONE = -2  # stands before the first token of an answer: matches nothing but `_ANY`
_WORD_BITS = 32


@dataclass(frozen=True)
class _SlotRules:
    """The rules of one request.

    Attributes:
        allowed: Sorted ids of the only tokens that may be chosen, or None.
        allowed_mask: ``[num_words]`` int32, the same as a bitmask.
        bias: Ids and ``float32`` values to add.
        forbidden: Ids that are bad words on their own.
        beginnings: ``[num_bad_words, longest]`` int32, what comes before the last token of
            bad words of several tokens, at the right, the rest `_ANY`.
        endings: ``[num_bad_words]`` int64, the last tokens.
        ends: Ids that may not be chosen before ``min_tokens``.
    """

    allowed: NDArray[np.int64] | None
    allowed_mask: NDArray[np.int32] | None
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    forbidden: NDArray[np.int64]
    beginnings: NDArray[np.int32]
    endings: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def lasts(self) -> bool:
        """True if there are other rules than the ends'."""
        return (
            self.allowed is not None
            or self.bias is not None
            or len(self.forbidden) > 0
            or len(self.endings) > 0
        )


@dataclass(frozen=True)
class _StaticRules:
    """What does not change from step to step as long as the rows are the same slots."""

    allowed_masks: tuple[Tensor, Tensor] | None  # bitmasks and their rows
    forbidden: TokenEntries | None
    bias: tuple[TokenEntries, Tensor] | None


class LogitsRules:
    """The rules of ``max_num_seqs`` slots.

    Arrays are made when a request enters its slot. A step builds none for rows without
    rules, and for the others only what depends on the tokens so far.

    Attributes:
        repetition, frequency, presence: ``[max_num_seqs]`` float32.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self._has_penalty = np.zeros(max_num_seqs, np.bool_)
        # Rules that count from the first token to the last, as ends that come too early don't.
        self._has_lasting = np.zeros(max_num_seqs, np.bool_)
        self._has_sequences = np.zeros(max_num_seqs, np.bool_)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._rules: dict[int, _SlotRules] = {}
        self._static_key: tuple[bytes, int] | None = None
        self._static = _StaticRules(None, None, None)
        self._version = 0

    def set(self, slot: int, params: SamplingParams) -> None:
        """Take the rules of the request that enters `slot`."""
        self.clear(slot)
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self._has_penalty[slot] = (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )
        rules = _slot_rules(params)
        self._has_lasting[slot] = self._has_penalty[slot] or (rules is not None and rules.lasts)
        if rules is not None:
            self._rules[slot] = rules
            self._has_sequences[slot] = len(rules.endings) > 0
            self._min_tokens[slot] = params.min_tokens if len(rules.ends) else 0
            self._version += 1

    def clear(self, slot: int) -> None:
        """Forget the rules of `slot`."""
        self._has_penalty[slot] = self._has_lasting[slot] = self._has_sequences[slot] = False
        self.repetition[slot], self.frequency[slot], self.presence[slot] = 1, 0, 0
        self._min_tokens[slot] = 0
        if self._rules.pop(slot, None) is not None:
            self._version += 1

    def has_any(self, slot: int) -> bool:
        """True if `slot` has a rule, now or at some time."""
        return slot in self._rules or bool(self._has_penalty[slot])

    def would_change(self, batch: InputBatch, slots: NDArray[np.int64]) -> bool:
        """True if `apply` has something to do for these rows."""
        return bool(self._has_lasting[slots].any() or len(self._early_rows(batch, slots)))

    def apply(self, logits: Tensor, batch: InputBatch, slots: NDArray[np.int64]) -> None:
        """Apply the rules of each row, in place.

        Masks come first, then the bias, and penalties last: they look at a logit's sign.

        Args:
            logits: ``[num_rows, vocab_size]`` float32.
            batch: Tokens, by slot.
            slots: ``[num_rows]``, the slot of each row.
        """
        static = self._static_for(slots, logits)
        if static.allowed_masks is not None:
            apply_bitmask(logits, *static.allowed_masks)
        forbidden = self._forbidden_now(batch, slots)
        for entries in (static.forbidden, _on_device(forbidden, logits)):
            if entries is not None:
                mask_logits(logits, forbidden=entries)
        if static.bias is not None:
            mask_logits(logits, bias=static.bias)
        if self._has_penalty[slots].any():
            self._penalize(logits, batch, slots)

    def _static_for(self, slots: NDArray[np.int64], logits: Tensor) -> _StaticRules:
        key = (slots.tobytes(), self._version)
        if key != self._static_key:
            rules = [self._rules.get(slot) for slot in slots.tolist()]
            self._static = _StaticRules(
                _allowed_masks(rules, logits),
                _on_device(
                    _entries([None if rule is None else rule.forbidden for rule in rules]), logits
                ),
                _bias(rules, logits),
            )
            self._static_key = key
        return self._static

    def _forbidden_now(
        self, batch: InputBatch, slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return rows and ids of ends that come too early and of bad words' last tokens."""
        ids: list[NDArray[np.int64] | None] = [None] * len(slots)
        for row in self._early_rows(batch, slots).tolist():
            ids[row] = self._rules[int(slots[row])].ends
        for row in np.flatnonzero(self._has_sequences[slots]).tolist():
            slot = int(slots[row])
            rules, early = self._rules[slot], ids[row]
            endings = _bad_endings(rules, batch, slot)
            if len(endings) == 0:
                continue
            together = endings if early is None else np.concatenate((early, endings))
            if not _forbids_all(rules, together):
                ids[row] = together
        return _entries(ids)

    def _early_rows(self, batch: InputBatch, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows that have not reached their ``min_tokens``."""
        min_tokens = self._min_tokens[slots]
        if not min_tokens.any():
            return np.empty(0, np.int64)
        num_output_tokens = batch.num_tokens[slots] - batch.num_prompt_tokens[slots]
        return np.flatnonzero(num_output_tokens < min_tokens)

    def _penalize(self, logits: Tensor, batch: InputBatch, slots: NDArray[np.int64]) -> None:
        penalized = self._has_penalty[slots]
        rows = np.flatnonzero(penalized)
        # The others' tokens are neither copied nor counted.
        num_tokens = np.where(penalized, batch.num_tokens[slots], 0)
        width = int(num_tokens.max())
        token_ids = np.zeros((len(slots), width), np.int32)  # [num_rows, width]
        token_ids[rows] = batch.token_ids[slots[rows], :width]
        arrays = (
            *(token_ids, batch.num_prompt_tokens[slots], num_tokens),
            *(self.repetition[slots], self.frequency[slots], self.presence[slots]),
        )
        apply_penalties(logits, *(torch.from_numpy(array).to(logits.device) for array in arrays))


def _slot_rules(params: SamplingParams) -> _SlotRules | None:
    ends = params.min_tokens > 0 and {*params.eos_token_ids, *params.stop_token_ids}
    allowed, words = params.allowed_token_ids, params.bad_words_token_ids
    if not (ends or allowed is not None or words or params.logit_bias):
        return None
    singles = [word[0] for word in words if len(word) == 1]
    sequences = [word for word in words if len(word) > 1]
    longest = max((len(word) - 1 for word in sequences), default=0)
    beginnings = np.full((len(sequences), longest), _ANY, np.int32)
    for index, word in enumerate(sequences):
        beginnings[index, longest + 1 - len(word) :] = word[:-1]
    allowed_ids = None if allowed is None else np.unique(np.array(allowed, np.int64))
    return _SlotRules(
        allowed=allowed_ids,
        allowed_mask=None if allowed_ids is None else _bitmask(allowed_ids),
        bias=_bias_arrays(params.logit_bias),
        forbidden=np.array(singles, np.int64),
        beginnings=beginnings,
        endings=np.array([word[-1] for word in sequences], np.int64),
        ends=np.array(sorted(ends or ()), np.int64),
    )


def _bitmask(ids: NDArray[np.int64]) -> NDArray[np.int32]:
    bits = np.zeros((int(ids.max()) // _WORD_BITS + 1) * _WORD_BITS, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _bias_arrays(
    bias: dict[int, float] | None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    if not bias:
        return None
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)


def _bad_endings(rules: _SlotRules, batch: InputBatch, slot: int) -> NDArray[np.int64]:
    """Return the last tokens of those bad words whose beginning ends the answer so far."""
    longest = rules.beginnings.shape[1]
    end = int(batch.num_tokens[slot])
    start = max(int(batch.num_prompt_tokens[slot]), end - longest)
    recent = np.full(longest, _NONE, np.int32)
    if start < end:
        recent[longest - (end - start) :] = batch.token_ids[slot, start:end]
    matches = (rules.beginnings == recent) | (rules.beginnings == _ANY)
    endings: NDArray[np.int64] = rules.endings[matches.all(axis=1)]
    return endings


def _forbids_all(rules: _SlotRules, forbidden: NDArray[np.int64]) -> bool:
    """True if no allowed token would be left: then the bad words give way."""
    if rules.allowed is None:
        return False
    return bool(np.isin(rules.allowed, np.concatenate((forbidden, rules.forbidden))).all())


def _entries(
    ids: list[NDArray[np.int64] | None],
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return rows and ids, flat, or None if there are none."""
    given = [(row, item) for row, item in enumerate(ids) if item is not None and len(item)]
    if not given:
        return None
    rows = np.repeat([row for row, _ in given], [len(item) for _, item in given])
    return rows, np.concatenate([item for _, item in given])


def _on_device(
    entries: tuple[NDArray[np.int64], NDArray[np.int64]] | None, logits: Tensor
) -> TokenEntries | None:
    if entries is None:
        return None
    rows, ids = entries
    known = ids < logits.shape[-1]
    rows, ids = rows[known], ids[known]
    return TokenEntries(
        torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device)
    )


def _allowed_masks(rules: list[_SlotRules | None], logits: Tensor) -> tuple[Tensor, Tensor] | None:
    masks = {
        row: rule.allowed_mask
        for row, rule in enumerate(rules)
        if rule is not None and rule.allowed_mask is not None
    }
    if not masks:
        return None
    words = np.zeros((len(masks), max(map(len, masks.values()))), np.int32)
    for index, mask in enumerate(masks.values()):
        words[index, : len(mask)] = mask
    return torch.from_numpy(words).to(logits.device), torch.tensor(
        list(masks), device=logits.device
    )


def _bias(rules: list[_SlotRules | None], logits: Tensor) -> tuple[TokenEntries, Tensor] | None:
    biases = [rule.bias if rule is not None else None for rule in rules]
    flat = _entries([None if bias is None else bias[0] for bias in biases])
    if flat is None:
        return None
    values = np.concatenate([bias[1] for bias in biases if bias is not None])
    known = flat[1] < logits.shape[-1]
    entries = _on_device(flat, logits)
    assert entries is not None
    return entries, torch.from_numpy(values[known]).to(logits.device)
