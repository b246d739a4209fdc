"""Runs a model whose texts are pooled: vectors come out, and nothing is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo_core.pooling_params import PooledOutput, PoolingParams
from octavo_core.scheduler_output import SchedulerOutput
from octavo_worker.layers.pooling import Pooler, combine, condense, to_output
from octavo_worker.model_runner import ComputedStep, ModelRunner
from octavo_worker.models.bert import BertModel
from octavo_worker.models.model import Model

_NO_ROWS = np.zeros(0, np.int64)


class PoolingModelRunner(ModelRunner):
    """Pools the texts of a decoder, which may be computed in pieces.

    Args:
        model: The model, its weights loaded.
        pooler: What is made of its hidden states.
        options: As for `ModelRunner`.
    """

    samples = False

    def __init__(self, model: Model, pooler: Pooler, **options: Any) -> None:
        super().__init__(model, **options)
        self._pooler = pooler
        self._params: dict[int, PoolingParams] = {}  # by slot, as the next
        # Of texts whose last token is not computed yet, what is kept of each piece.
        self._pieces: dict[int, list[Tensor]] = {}

    @torch.inference_mode()
    def _execute(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        self.batch.apply(scheduler_output)
        self._swap_blocks(scheduler_output)
        for request in scheduler_output.new_requests:
            assert request.pooling_params is not None, "the engine lets no other request in"
            self._params[request.slot] = request.pooling_params
            self._pieces[request.slot] = []
        pooled: dict[int, PooledOutput] = {}
        slots = scheduler_output.slots
        if slots:
            hidden = self._hidden_states(scheduler_output)  # [num_tokens, hidden_size]
            texts = torch.split(hidden, scheduler_output.num_scheduled_tokens)
            for index, (slot, text) in enumerate(zip(slots, texts, strict=True)):
                end = scheduler_output.num_computed_tokens[index] + len(text)
                result = self._pool(slot, text, end)
                if result is not None:
                    pooled[index] = result
        return ComputedStep(
            scheduler_output.step_id,
            len(slots),
            _NO_ROWS,
            _NO_ROWS,
            torch.empty(0),
            pooled=pooled,
        )

    def _hidden_states(self, scheduler_output: SchedulerOutput) -> Tensor:
        return self.forward(self.prepare_input(scheduler_output), self.kv_caches)

    def _pool(self, slot: int, text: Tensor, end: int) -> PooledOutput | None:
        """Take a piece of a text; at its end, return what it makes."""
        params, pieces = self._params[slot], self._pieces[slot]
        pooling, num_tokens = self._pooler.spec.pooling, int(self.batch.num_tokens[slot])
        pieces.append(text.float() if params.is_per_token else condense(text, pooling))
        if end < num_tokens:
            return None
        rows = torch.cat(pieces) if params.is_per_token else combine(pieces, pooling, num_tokens)
        self._pieces[slot] = []
        return to_output(self._pooler.finish(rows, params), params)


class EncoderRunner(PoolingModelRunner):
    """Pools the texts of an encoder, each of which is computed as a whole.

    Args:
        model: The model, its weights loaded.
        pooler: What is made of its hidden states.
        max_num_seqs: Slots of the batch.
        device: Where the model is.
    """

    def __init__(
        self, model: BertModel, pooler: Pooler, *, max_num_seqs: int, device: torch.device
    ) -> None:
        # There are no blocks, so their size means nothing; nor does it look at the cache.
        super().__init__(_NoModel(), pooler, max_num_seqs=max_num_seqs, block_size=1, device=device)
        self._encoder = model

    def _hidden_states(self, scheduler_output: SchedulerOutput) -> Tensor:
        lengths = scheduler_output.num_scheduled_tokens
        slots = scheduler_output.slots
        ids = [self.batch.token_ids[slot, :n] for slot, n in zip(slots, lengths, strict=True)]
        positions = np.concatenate([np.arange(length) for length in lengths])
        types = np.zeros(len(positions), np.int64)
        start = 0
        for slot, length in zip(slots, lengths, strict=True):
            if length != self.batch.num_tokens[slot]:
                raise RuntimeError(f"slot {slot} is scheduled in pieces, and it is an encoder's")
            second = self._params[slot].second_segment
            if second:
                types[start + second : start + length] = 1
            start += length
        return self._encoder.forward(
            self._on_device(np.concatenate(ids)),
            self._on_device(positions),
            self._on_device(types),
            lengths,
        )

    def _on_device(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)


class _NoModel:
    """Stands where a decoder would be."""

    def forward(self, *arguments: Any) -> Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError
