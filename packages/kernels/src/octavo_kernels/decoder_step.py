"""A whole step of a persistent batch as one call of the CPU kernels.

Beside `Decoder`, which is all layers in one call, stand the embedding, the head, the sampler and
what a step needs to know of its batch. One after the other they are about 570 calls of Python,
numpy and torch, which find nothing in the caches after a step's weights went through them: a fifth
of a step of a small model. Here they are one.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_kernels.attention_problem import (
    NO_WINDOW,
    PROBLEM_FORMAT,
    TILE_ROWS,
    TOKEN_BYTES,
    UNIT_BYTES,
    Division,
    divide,
    plan_units,
    thread_scratch_bytes,
)
from octavo_kernels.cpu.jit import Kernel
from octavo_kernels.cpu.threads import get_num_threads
from octavo_kernels.decoder import (
    KEY_CACHE_WORD,
    PROBLEM_WORD,
    SLOTS_WORD,
    VALUE_CACHE_WORD,
    Decoder,
    DecoderBuffers,
    buffers_for,
    decode,
)
from octavo_kernels.embed_tokens import EMBED
from octavo_kernels.packed_weight import PackedWeight
from octavo_kernels.row_scratch import row_scratch
from octavo_kernels.sample import sample_rows

run_step = Kernel("decoder_step.run_step", "q")

# Words of `octavo_kernels.cpu.decoder_step`, which is not imported here, since it imports numba.
_SET_BY_STEP = 4  # NUM_SLOTS, SAMPLES, STEP_MAX_ROWS, STEP_IS_SPLIT
_ERROR, _NUM_ROWS, _FIRST_FIXED = 4, 5, 6


class BatchTables(Protocol):
    """What a step reads of its batch, by slot, and where it appends the tokens it samples.

    All arrays are contiguous; where one is replaced by a larger one, the next step sees it.

    Attributes:
        token_ids: ``[max_num_seqs, capacity]`` int32; there is room for one more than is known.
        num_tokens: ``[max_num_seqs]`` int64, how many are known.
        block_tables: For each KV group ``[max_num_seqs, capacity]`` int32.
        num_blocks: ``[max_num_seqs]`` int64, of each group.
        temperature: ``[max_num_seqs]`` float32; 0 takes the likeliest token.
        top_k: ``[max_num_seqs]`` int32; 0 is off.
        top_p: ``[max_num_seqs]`` float32; 1 is off.
        log_min_p: ``[max_num_seqs]`` float32, logarithm of min-p; minus infinity is off.
        seeds: ``[max_num_seqs]`` int64.
    """

    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    block_tables: list[NDArray[np.int32]]
    num_blocks: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    log_min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]


class DecoderStep:
    """Steps of a batch through a whole model.

    Args:
        decoder: All layers and the final norm.
        embedding: ``[vocab_size, hidden_size]``.
        head: ``[vocab_size, hidden_size]``.
        tables: The batch.
        kv_caches: Key and value cache of each layer, as `Decoder.forward` takes them.
        scale: Factor of the scores.
        group_of_layer: Which of the block tables each layer has; by default all have the first.
        embedding_scale: Factor of the embedding; None for none.
        logits_soft_cap: Logits are ``soft_cap * tanh(logits / soft_cap)``; None for no bound.

    Raises:
        ValueError: The weights can't be used in one call, see `fits_step`.
    """

    def __init__(
        self,
        decoder: Decoder,
        embedding: PackedWeight,
        head: PackedWeight,
        tables: BatchTables,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        scale: float,
        *,
        group_of_layer: Sequence[int] = (),
        embedding_scale: float | None = None,
        logits_soft_cap: float | None = None,
    ) -> None:
        if not fits_step(embedding, head):
            raise ValueError("embedding and head must not have sorted inputs, nor be of type e4m3")
        if len(kv_caches) != len(decoder.layers):
            raise ValueError(f"{len(kv_caches)} KV caches for {len(decoder.layers)} layers")
        self._decoder, self._embedding, self._head = decoder, embedding, head
        self._tables, self._kv_caches, self._scale = tables, list(kv_caches), scale
        self._groups = list(group_of_layer) or [0] * len(kv_caches)
        self._embedding_scale, self._logits_soft_cap = embedding_scale, logits_soft_cap
        self._block_size = kv_caches[0][0].shape[2]
        max_num_seqs = len(tables.num_tokens)
        self._slots = np.zeros((3, max_num_seqs), np.int64)  # slots, counts and starts
        self._sampled = np.zeros((2, max_num_seqs), np.int64)  # tokens by slot, and whose a row is
        self._rows = _SamplingRows(max_num_seqs)
        self._head_parts = decoder.parts([head])
        self._memory: _StepMemory | None = None

    @property
    def samples(self) -> bool:
        """Whether there is `sample`: not where logits have a bound, which is torch's."""
        return self._logits_soft_cap is None

    def sample(
        self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int]
    ) -> list[int]:
        """Run a step, sample, and append the tokens to the batch.

        Args:
            slots: Who computes.
            counts: How many tokens each computes, at least 1.
            starts: Positions of the first of them.

        Returns:
            For each of `slots` the sampled token, or -1 where known tokens are left to compute.

        Raises:
            RuntimeError: A slot has not the token or block that it is to compute; nothing is done.
        """
        self._run(slots, counts, starts, samples=True)
        sampled: list[int] = self._sampled[0, : len(slots)].tolist()
        return sampled

    def compute_logits(
        self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int]
    ) -> tuple[NDArray[np.int64], Tensor]:
        """Run a step, and leave the sampling to the caller.

        Returns:
            ``[num_rows]``, which of `slots` have their last known token computed, and
            ``[num_rows, vocab_size]`` float32, their logits: the next step's memory as well.

        Raises:
            RuntimeError: As in `sample`.
        """
        memory = self._run(slots, counts, starts, samples=False)
        num_rows = int(memory.step[_NUM_ROWS])
        rows, logits = self._sampled[1, :num_rows].copy(), memory.logits[:num_rows]
        if self._logits_soft_cap is not None:
            logits = torch.tanh(logits / self._logits_soft_cap) * self._logits_soft_cap
        return rows, logits

    def _run(
        self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int], samples: bool
    ) -> _StepMemory:
        num_slots, num_tokens = len(slots), sum(counts)
        division = divide(
            num_tokens,
            num_slots,
            max(map(operator.add, starts, counts)),
            self._decoder.num_heads,
            self._decoder.num_kv_heads,
        )
        memory = self._memory_for(num_slots, num_tokens, division)
        self._slots[:, :num_slots] = (slots, counts, starts)
        memory.step[:_SET_BY_STEP] = (num_slots, samples, division.max_rows, division.is_split)
        run_step(memory.address)
        error = memory.step[_ERROR]
        if error >= 0:
            raise self._unknown(slots[error], starts[error] + counts[error])
        return memory

    def _memory_for(self, num_slots: int, num_tokens: int, division: Division) -> _StepMemory:
        memory = self._memory
        if memory is None or not memory.fits(
            self._tables, num_slots, num_tokens, division, get_num_threads()
        ):
            memory = _StepMemory(self, num_slots, num_tokens, division, memory)
            self._memory = memory
        return memory

    def _unknown(self, slot: int, end: int) -> RuntimeError:
        tables = self._tables
        return RuntimeError(
            f"slot {slot} is scheduled up to token {end}, but has {tables.num_tokens[slot]} tokens "
            f"and blocks for {tables.num_blocks[slot] * self._block_size}"
        )


def fits_step(embedding: PackedWeight, head: PackedWeight) -> bool:
    """Whether a model with this embedding and head can be run by `DecoderStep`."""
    return embedding.kind in EMBED and embedding.input_order is None and head.input_order is None


class _SamplingRows:
    """Sampling parameters of a step's rows, which the kernel copies from their slots."""

    def __init__(self, max_rows: int) -> None:
        self._floats = np.zeros((4, max_rows), np.float32)  # temperature, top-k, top-p, min-p
        self._integers = np.zeros((3, max_rows), np.int64)  # seeds, positions, and tokens sampled
        columns = (*self._floats, *self._integers)
        *self.words, self.tokens = (column.ctypes.data for column in columns)


class _StepMemory:
    """The words of steps up to some size, and the memory that they point to.

    Attributes:
        address: Of the words of the step.
        step: Those words.
        logits: ``[most_rows, vocab_size]`` float32.
    """

    def __init__(
        self,
        step: DecoderStep,
        num_slots: int,
        num_tokens: int,
        division: Division,
        last: _StepMemory | None,
    ) -> None:
        decoder, tables = step._decoder, step._tables
        last_buffers = None if last is None else last._buffers
        self._buffers: DecoderBuffers = buffers_for(decoder, num_tokens, last_buffers)
        capacity, num_threads = self._buffers.capacity, self._buffers.num_threads
        vocab_size = step._head.shape[0]
        self.logits: Tensor = torch.empty(0, vocab_size) if last is None else last.logits
        if num_slots > len(self.logits):
            most_rows = min(1 << (num_slots - 1).bit_length(), len(tables.num_tokens))
            self.logits = torch.empty(most_rows, vocab_size)
        self._most_slots = len(self.logits)
        self._fewest_tokens = self._buffers.fewest_tokens
        self._token_ids, self._block_tables = tables.token_ids, list(tables.block_tables)
        # Layers with one block table and one window are of one kind.
        windows = [layer.window for layer in decoder.layers]
        kind_of_layer = list(zip(step._groups, windows, strict=True))
        self._kind_keys = list(dict.fromkeys(kind_of_layer))
        self._kind_of_layer = [self._kind_keys.index(kind) for kind in kind_of_layer]
        # The flat batch: ids and positions of tokens, and their cache slots for each kind; starts
        # and ends of requests.
        self._flat = np.zeros((2 + len(self._kind_keys), capacity), np.int32)
        self._requests = np.zeros((2, len(tables.num_tokens) + 1), np.int32)
        self._last_tokens = np.zeros(len(tables.num_tokens), np.int64)
        self._most_units = 1 << division.most_units.bit_length()
        self._most_partials = self._most_units * division.max_rows if division.is_split else 0
        self._hidden = torch.empty(capacity, decoder.hidden_size)
        self._attended = torch.empty(capacity, decoder.num_heads, decoder.head_dim)
        self._embed_scratch = torch.empty(64 * num_threads, dtype=torch.uint8)
        self._row_scratch = row_scratch(vocab_size)
        self._describe_attention(step, num_threads)
        self._describe_calls(step)
        self.step = self._describe_step(step)
        self.address = self.step.ctypes.data

    def fits(
        self,
        tables: BatchTables,
        num_slots: int,
        num_tokens: int,
        division: Division,
        num_threads: int,
    ) -> bool:
        """Whether a step of this size has room, and the tables are where they were."""
        if not (
            self._fewest_tokens <= num_tokens <= self._buffers.capacity
            and num_slots <= self._most_slots
            and num_threads == self._buffers.num_threads
            and division.most_units <= self._most_units
            and tables.token_ids is self._token_ids
        ):
            return False
        if division.is_split and division.most_units * division.max_rows > self._most_partials:
            return False
        for table, known_table in zip(tables.block_tables, self._block_tables, strict=True):
            if table is not known_table:
                return False
        return True

    def _describe_attention(self, step: DecoderStep, num_threads: int) -> None:
        """Write one problem of attention for each layer, and one that is planned for all."""
        decoder = step._decoder
        num_heads, num_kv_heads, head_dim = (
            decoder.num_heads,
            decoder.num_kv_heads,
            decoder.head_dim,
        )
        group = num_heads // num_kv_heads
        largest = max(TILE_ROWS // group, 1) * group
        scratch_bytes = thread_scratch_bytes(largest, head_dim, head_dim)
        partial_bytes = self._most_partials * (head_dim + 2) * 4
        self._scratch = torch.empty(num_threads * scratch_bytes + partial_bytes, dtype=torch.uint8)
        num_kinds = len(self._kind_keys)
        self._tokens = torch.empty(
            num_kinds, self._buffers.capacity * TOKEN_BYTES, dtype=torch.uint8
        )
        self._units = torch.empty(num_kinds, self._most_units * UNIT_BYTES, dtype=torch.uint8)
        partials = self._scratch.data_ptr() + num_threads * scratch_bytes

        def problem(
            kind: int, key_cache: int = 0, value_cache: int = 0, stride: int = 0, sinks: int = 0
        ) -> NDArray[np.int64]:
            group, window = self._kind_keys[kind]
            table, tokens, units = self._block_tables[group], self._tokens[kind], self._units[kind]
            packed = PROBLEM_FORMAT.pack(
                *(self._buffers.query.data_ptr(), key_cache, value_cache),
                *(self._attended.data_ptr(), 0, 0, sinks),
                *(self._requests[0].ctypes.data, self._requests[1].ctypes.data),
                *(table.ctypes.data, step._slots[0].ctypes.data, tokens.data_ptr()),
                *(units.data_ptr(), self._scratch.data_ptr(), partials),
                *(0, 0, num_heads, num_kv_heads, head_dim, head_dim, step._block_size),
                *(table.shape[1], stride, window or NO_WINDOW, 0),
                *(step._scale, decoder.soft_cap or 0.0, 0, scratch_bytes),
            )
            return np.append(np.frombuffer(packed, np.int64), kind)

        caches = [
            (key.data_ptr(), value.data_ptr(), value.stride(2)) for key, value in step._kv_caches
        ]
        self._problems = np.stack(
            [
                problem(kind, *cache, sinks)
                for kind, cache, sinks in zip(
                    self._kind_of_layer, caches, decoder.sink_addresses, strict=True
                )
            ]
        )
        self._plans = np.stack([problem(kind) for kind in range(num_kinds)])
        self._kinds = np.array(
            [
                [
                    *(self._block_tables[group].ctypes.data, self._block_tables[group].shape[1]),
                    *(self._flat[2 + kind].ctypes.data, self._plans[kind].ctypes.data),
                ]
                for kind, (group, _) in enumerate(self._kind_keys)
            ]
        )
        self._layers = decoder.layer_words.copy()
        self._layers[:, PROBLEM_WORD] = self._problems.ctypes.data + (
            self._problems.strides[0] * np.arange(len(caches))
        )
        self._layers[:, KEY_CACHE_WORD : VALUE_CACHE_WORD + 1] = [cache[:2] for cache in caches]
        self._layers[:, SLOTS_WORD] = self._kinds[self._kind_of_layer, 2]

    def _describe_calls(self, step: DecoderStep) -> None:
        """Write the words of embedding, layers, head and sampler."""
        decoder, embedding = step._decoder, step._embedding
        self._embed = np.array(
            [
                *(self._flat[0].ctypes.data, 0, decoder.hidden_size, embedding.data.data_ptr()),
                0 if embedding.scales is None else embedding.scales.data_ptr(),
                *(self._embed_scratch.data_ptr(), self._hidden.data_ptr()),
            ]
        )
        words = decoder.step_words(
            self._buffers,
            step._kv_caches[0][0],
            layers=self._layers.ctypes.data,
            hidden=self._hidden.data_ptr(),
            num_tokens=0,
            positions=self._flat[1].ctypes.data,
            attended=self._attended.data_ptr(),
            output=0,
        )
        # The head is a projection as the layers have them, of other rows.
        self._decoder_words, self._head_words = np.array(words), np.array(words)
        self._sampling = np.array(
            [
                *(self.logits.data_ptr(), 4 * self.logits.shape[1], 0, self.logits.shape[1]),
                *(step._rows.tokens, *step._rows.words),
                *(self._row_scratch.data_ptr(), self._row_scratch.stride(0)),
            ]
        )

    def _describe_step(self, step: DecoderStep) -> NDArray[np.int64]:
        """Write the words of the step itself, all but those that each step sets."""
        tables, decoder = step._tables, step._decoder
        return np.array(
            [
                *([0] * _FIRST_FIXED),
                *(row.ctypes.data for row in (*step._slots, *step._sampled)),
                *(tables.token_ids.ctypes.data, tables.token_ids.strides[0]),
                *(tables.num_tokens.ctypes.data, tables.num_blocks.ctypes.data, step._block_size),
                *(tables.temperature.ctypes.data, tables.top_k.ctypes.data),
                *(tables.top_p.ctypes.data, tables.log_min_p.ctypes.data, tables.seeds.ctypes.data),
                *(self._flat[0].ctypes.data, self._flat[1].ctypes.data),
                *(self._requests[0].ctypes.data, self._requests[1].ctypes.data),
                self._last_tokens.ctypes.data,
                *(self._kinds.ctypes.data, len(self._kinds), plan_units.address),
                *(self._problems.ctypes.data, len(self._problems)),
                *(EMBED[step._embedding.kind].address, self._embed.ctypes.data),
                *(decode.address, self._decoder_words.ctypes.data, self._decoder_words.ctypes.data),
                *(self._head_words.ctypes.data, step._head_parts, decoder.final_norm.data_ptr()),
                *(self.logits.data_ptr(), 4 * self.logits.shape[1]),
                *(sample_rows.address, self._sampling.ctypes.data, self._sampling.ctypes.data),
                *step._rows.words,
                _float_word(step._embedding_scale or 1.0),
            ]
        )


def _float_word(value: float) -> int:
    """Return the word whose first four bytes are a float32."""
    word: int = struct.unpack("<q", struct.pack("<f4x", value))[0]
    return word
