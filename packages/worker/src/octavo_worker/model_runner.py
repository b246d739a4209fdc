"""Runs the model over the persistent batch, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.pooling_params import PooledOutput
from octavo_core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from octavo_core.wire import TokenLogprobs
from octavo_kernels import AttentionMetadata, DecoderStep, swap_blocks
from octavo_worker.input_batch import InputBatch
from octavo_worker.kv_caches import KVPool
from octavo_worker.layers.one_call import OneCallModel
from octavo_worker.models import KVCache, Model
from octavo_worker.sampler import sample_rows, sampling_metadata
from octavo_worker.token_logprobs import prompt_logprobs

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ModelInput:
    """One step's flat batch on the device.

    Attributes:
        input_ids: ``[num_tokens]`` int32.
        positions: ``[num_tokens]`` int32.
        metadata: How the tokens divide into requests, for each KV group.
        last_tokens: ``[num_rows]`` int32, places of the tokens that are followed by a new one.
        sampling: ``[6, num_rows]`` int64, how those are sampled, see `SamplingMetadata.packed`;
            None on a CPU, and where nothing is sampled.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: list[AttentionMetadata]
    last_tokens: Tensor
    sampling: Tensor | None


@dataclass(frozen=True)
class ComputedStep:
    """A step between its forward pass and its sampling.

    Attributes:
        num_slots: Slots that were scheduled.
        rows: ``[num_rows]``, index among them of those that sample.
        slots: ``[num_rows]``, their slots.
        logits: ``[num_rows, vocab_size]`` float32, or None where there are only hidden states.
        hidden: ``[num_rows, hidden_size]``, hidden states of their last tokens, or None where
            there are logits.
        sampling: See `ModelInput`.
        prompt_logprobs: By index among the slots, for prompts that are to be reported on.
        pooled: Likewise, what was pooled of texts; then nothing is sampled.
    """

    step_id: int
    num_slots: int
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    logits: Tensor | None = None
    hidden: Tensor | None = None
    sampling: Tensor | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, PooledOutput] = field(default_factory=dict)


class ModelRunner:
    """Turns scheduler outputs into sampled tokens.

    A step is one call of the kernels where the model has that, and else an operation after the
    other: the tokens are the same, bit for bit.

    Args:
        model: The model, its weights loaded.
        max_num_seqs: Slots of the batch.
        block_size: Tokens in a KV block.
        device: Where the model is.
        groups: Layers that share a block table; by default all of them do.

    Attributes:
        samples: Whether the model has logits here, and not on a later stage of a pipeline.
    """

    samples: bool = True

    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int,
        block_size: int,
        device: torch.device,
        groups: Sequence[KVCacheGroup] = (),
    ) -> None:
        self.batch = InputBatch(max_num_seqs, block_size, max(len(groups), 1))
        # Layers that keep nothing in the cache are in no group, and look at no table.
        self._group_of_layer = {
            layer: index for index, group in enumerate(groups) for layer in group.layers
        }
        self.kv_caches: list[KVCache] = []
        self.host_kv_caches: list[KVCache] = []  # the tier that blocks are swapped out to
        self._host_block_step = 1
        self._model = model
        self._block_size = block_size
        self._device = device
        self._decoder_step: DecoderStep | None = None
        self._caches_of_step: list[KVCache] | None = None
        self._unsampled: deque[ComputedStep | ModelRunnerOutput | Exception] = deque()

    def use_kv_pools(self, pool: KVPool, host_pool: KVPool | None) -> None:
        """Keep keys and values in a pool from now on, and what is swapped out in another."""
        self.kv_caches, self.batch.block_step = pool
        if host_pool is not None:
            self.host_kv_caches, self._host_block_step = host_pool

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Run the forward pass of one step.

        An error is kept, and raised by the `sample_tokens` that belongs to this step.
        """
        try:
            self._unsampled.append(self._execute(scheduler_output))
        except Exception as error:  # whatever it is, the engine has to hear of it
            self._unsampled.append(error)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the oldest step not yet sampled, and append the tokens to their slots.

        After an error no token has been appended.

        Raises:
            Exception: Whatever went wrong in the step.
        """
        step = self._unsampled.popleft()
        if isinstance(step, Exception):
            raise step
        if isinstance(step, ModelRunnerOutput):
            assert grammar is None, "a step under a grammar was sampled without its mask"
            return step
        return self._sample(step, grammar)

    def _execute(self, scheduler_output: SchedulerOutput) -> ComputedStep | ModelRunnerOutput:
        self.batch.apply(scheduler_output)
        self._swap_blocks(scheduler_output)
        slots = scheduler_output.slots
        if not slots:  # a step that only frees slots
            return ModelRunnerOutput(scheduler_output.step_id, [])
        if not self.batch.needs_prompt_logits(slots):
            decoder_step = self._step_of_caches()
            if decoder_step is not None:
                return self.run_one_call(decoder_step, scheduler_output)
        return self._run_operations(scheduler_output)

    def run_one_call(
        self, decoder_step: DecoderStep, scheduler_output: SchedulerOutput
    ) -> ComputedStep | ModelRunnerOutput:
        """Compute a step in one call, and sample too, where nothing but its logits decides."""
        slots, starts = scheduler_output.slots, scheduler_output.num_computed_tokens
        step = slots, scheduler_output.num_scheduled_tokens, starts
        if decoder_step.samples and not self.batch.needs_logits(slots):
            self.batch.reserve(max(starts) + max(step[1]) + 1)
            return ModelRunnerOutput(scheduler_output.step_id, decoder_step.sample(*step))
        rows, logits = decoder_step.compute_logits(*step)
        return ComputedStep(
            scheduler_output.step_id, len(slots), rows, np.array(slots, np.int64)[rows], logits
        )

    def _step_of_caches(self) -> DecoderStep | None:
        """Return the model's steps over the caches, which are there after the model."""
        if self._caches_of_step is not self.kv_caches:
            self._caches_of_step = self.kv_caches
            self._decoder_step = None
            if isinstance(self._model, OneCallModel):
                groups = [self._group_of_layer.get(i, 0) for i in range(len(self.kv_caches))]
                self._decoder_step = self._model.decoder_step(self.batch, self.kv_caches, groups)
        return self._decoder_step

    @torch.inference_mode()
    def _run_operations(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        slots = np.array(scheduler_output.slots, np.int64)
        model_input = self.prepare_input(scheduler_output)
        metadata = model_input.metadata[0]  # lengths are the same for all groups
        rows = self._rows_to_sample(slots, np.array(metadata.host_seq_lens, np.int64))
        hidden = self.forward(model_input, self.kv_caches)  # [num_tokens, hidden_size]
        reports: dict[int, list[TokenLogprobs]] = {}
        if self.samples and (self.batch.num_prompt_logprobs[slots] >= 0).any():
            reports = prompt_logprobs(
                hidden,
                self._model.compute_logits,
                self.batch,
                slots,
                metadata.host_query_start_loc,
                scheduler_output.num_computed_tokens,
            )
        return ComputedStep(
            scheduler_output.step_id,
            len(slots),
            rows,
            slots[rows],
            hidden=_take_rows(hidden, model_input.last_tokens),
            sampling=model_input.sampling,
            prompt_logprobs=reports,
        )

    @torch.inference_mode()
    def _sample(self, step: ComputedStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        sampled = np.full(step.num_slots, -1, np.int64)
        if len(step.rows) == 0:
            return ModelRunnerOutput(
                step.step_id, sampled.tolist(), {}, step.prompt_logprobs, step.pooled
            )
        logits = step.logits  # [num_rows, vocab_size]
        if logits is None:
            assert step.hidden is not None
            logits = self._model.compute_logits(step.hidden)
        token_ids, logprobs = sample_rows(logits, self.batch, step.slots, grammar, step.sampling)
        self.batch.append_tokens(step.slots, token_ids)
        sampled[step.rows] = token_ids
        by_index = {int(step.rows[row]): value for row, value in logprobs.items()}
        return ModelRunnerOutput(step.step_id, sampled.tolist(), by_index, step.prompt_logprobs)

    def forward(self, model_input: ModelInput, kv_caches: list[KVCache]) -> Tensor:
        """Compute the last hidden states, ``[num_tokens, hidden_size]``."""
        metadata = [
            model_input.metadata[self._group_of_layer.get(layer, 0)]
            for layer in range(len(kv_caches))
        ]
        return self._model.forward(
            model_input.input_ids, model_input.positions, kv_caches, metadata
        )

    def prepare_input(self, scheduler_output: SchedulerOutput) -> ModelInput:
        """Lay the scheduled tokens out flat, one slot after the other.

        Raises:
            RuntimeError: The scheduler asks for a token or block that a slot doesn't have.
        """
        slots = np.array(scheduler_output.slots, np.int64)
        query_lens = np.array(scheduler_output.num_scheduled_tokens, np.int64)
        num_computed = np.array(scheduler_output.num_computed_tokens, np.int64)
        seq_lens = num_computed + query_lens
        self._check_known(slots, seq_lens)
        query_start_loc = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(query_lens, out=query_start_loc[1:])
        # For each token its row, its position in the sequence, and its slot in the cache.
        row_of = np.repeat(np.arange(len(slots)), query_lens)  # [num_tokens]
        positions = np.arange(query_start_loc[-1]) - (query_start_loc[:-1] - num_computed)[row_of]
        input_ids = self.batch.token_ids[slots[row_of], positions]
        block_of, offset = np.divmod(positions, self._block_size)
        slot_mappings = [
            table[slots[row_of], block_of].astype(np.int64) * self._block_size + offset
            for table in self.batch.block_tables
        ]
        max_blocks = -(-int(seq_lens.max(initial=0)) // self._block_size)
        rows = self._rows_to_sample(slots, seq_lens)
        return self.to_device(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            slot_mappings=slot_mappings,
            block_tables=[table[slots, :max_blocks] for table in self.batch.block_tables],
            last_tokens=query_start_loc[1:][rows] - 1,
            sampling=self._pack_sampling(slots[rows]),
        )

    def _rows_to_sample(
        self, slots: NDArray[np.int64], seq_lens: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the indices of those whose last known token a step computes."""
        return np.flatnonzero(seq_lens == self.batch.num_tokens[slots])

    def _pack_sampling(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what the sampler of a GPU reads, to go there with the rest of the step."""
        if self._device.type == "cpu" or not self.samples:
            return _NOTHING
        return sampling_metadata(self.batch, slots).packed()

    def to_device(
        self,
        *,
        input_ids: NDArray[np.int32],
        positions: NDArray[np.int64],
        query_start_loc: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        slot_mappings: Sequence[NDArray[np.int64]],
        block_tables: Sequence[NDArray[np.int32]],
        last_tokens: NDArray[np.int64] = _NOTHING,
        sampling: NDArray[np.int64] = _NOTHING,
    ) -> ModelInput:
        """Copy a flat batch to the device, all arrays in one transfer.

        All but `sampling` fits int32: a cache of 2**31 slots would be larger than any memory.
        """
        # First what has 8 bytes a number, so that it lies at a multiple of them.
        arrays: list[NDArray[Any]] = [sampling.view(np.int32), last_tokens, input_ids, positions]
        arrays += [query_start_loc, seq_lens, *slot_mappings, *block_tables]
        parts: Sequence[Tensor]
        if self._device.type == "cpu":
            parts = [torch.from_numpy(array.astype(np.int32, order="C")) for array in arrays]
        else:
            packed = np.concatenate(
                [array.ravel() for array in arrays], dtype=np.int32, casting="unsafe"
            )
            # From pinned memory, so that the host goes on; torch keeps it until it was copied.
            staged = torch.from_numpy(packed).pin_memory()
            on_device = staged.to(self._device, non_blocking=True)
            parts = torch.split(on_device, [array.size for array in arrays])
        of_sampling, of_rows, ids, places, locations, sizes, *others = parts
        starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
        metadata = [
            AttentionMetadata(
                query_start_loc=locations,
                seq_lens=sizes,
                block_tables=others[len(slot_mappings) + group].view(table.shape),
                slot_mapping=others[group],
                host_query_start_loc=starts,
                host_seq_lens=lengths,
                block_size=self._block_size,
            )
            for group, table in enumerate(block_tables)
        ]
        packed_sampling = of_sampling.view(torch.int64).view(6, -1) if sampling.size else None
        return ModelInput(ids, places, metadata, of_rows, packed_sampling)

    def _swap_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Copy evicted blocks to the host, and then those that are wanted again back."""
        if not (scheduler_output.blocks_to_swap_out or scheduler_output.blocks_to_swap_in):
            return
        steps = torch.tensor([self.batch.block_step, self._host_block_step])
        out = _last_copies(scheduler_output.blocks_to_swap_out) * steps
        into = _last_copies(scheduler_output.blocks_to_swap_in) * steps.flip(0)
        for device, host in _distinct(self.kv_caches, self.host_kv_caches):
            for device_cache, host_cache in zip(device, host, strict=True):
                swap_blocks(device_cache, host_cache, out)
                swap_blocks(host_cache, device_cache, into)

    def _check_known(self, slots: NDArray[np.int64], seq_lens: NDArray[np.int64]) -> None:
        num_tokens = self.batch.num_tokens[slots]
        capacity = self.batch.num_blocks[slots] * self._block_size
        wrong = np.flatnonzero((seq_lens > num_tokens) | (seq_lens > capacity))
        if len(wrong):
            row = int(wrong[0])
            raise RuntimeError(
                f"slot {slots[row]} is scheduled up to token {seq_lens[row]}, but has "
                f"{num_tokens[row]} tokens and blocks for {capacity[row]}"
            )


def _take_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """Return ``[num_rows, hidden_size]`` of ``[num_tokens, hidden_size]``."""
    if len(rows) == len(hidden):  # a step of decodes alone
        return hidden
    if hidden.is_cpu and hidden.dtype == torch.float32:
        # Some kilobytes, for which torch would wake its threads, while ours may still spin.
        return torch.from_numpy(hidden.numpy()[rows.numpy()])
    return hidden.index_select(0, rows)


def _distinct(
    device: Sequence[KVCache], host: Sequence[KVCache]
) -> Iterable[tuple[KVCache, KVCache]]:
    """Pair the caches up; layers of other groups may be in the same ones."""
    pairs = zip(device, host, strict=True)
    return {id(pair[0].key): pair for pair in pairs if pair[0].key.numel()}.values()


def _last_copies(pairs: list[tuple[int, int]]) -> Tensor:
    """Return ``[num_pairs, 2]`` int64 of block ids, from and to.

    Of several copies to one block the last counts, as if they were made one by one.
    """
    last = {to_block: from_block for from_block, to_block in pairs}
    return torch.tensor([(source, target) for target, source in last.items()]).view(-1, 2)
