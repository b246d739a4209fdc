"""A model definition as one worker among several runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from octavo_core.model_spec import ModelSpec
from octavo_kernels import AttentionMetadata
from octavo_worker.models import KVCache, Model
from octavo_worker.parallel_state import ParallelGroup
from octavo_worker.sharding import vocabulary_of_rank


class ParallelModel:
    """Surrounds a model with what the pipeline and the divided vocabulary need.

    Args:
        model: The worker's part.
        spec: Of the whole model.
        group: The other workers.
        dtype: Type of hidden states.
        device: Where the model is.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._spec = spec
        self._group = group
        self._dtype, self._device = dtype, device
        # Ranks have as many columns, except for the last one, which may have fewer.
        self._columns = len(vocabulary_of_rank(spec, group.place._replace(rank=0)))
        self._vocabulary = vocabulary_of_rank(spec, group.place)
        self._num_tokens = 0
        self._owes_receive = self._owes_send = False

    def begin_step(self, num_tokens: int) -> None:
        """Note what the neighbours in the pipeline wait for, should the step fail here."""
        place = self._group.place
        self._num_tokens = num_tokens
        self._owes_receive = num_tokens > 0 and not place.is_first_stage
        self._owes_send = num_tokens > 0 and not place.is_last_stage

    def fail_step(self) -> None:
        """After an error, exchange what the neighbours wait for, whatever is in it."""
        if self._owes_receive:
            self._receive()
        if self._owes_send:
            self._send(torch.zeros(self._hidden_shape(), dtype=self._dtype, device=self._device))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """Compute this stage: hidden states come from the stage before, and go to the next."""
        self._num_tokens = len(input_ids)
        hidden = input_ids if self._group.place.is_first_stage else self._receive()
        hidden = self._model.forward(hidden, positions, kv_caches, metadata)
        if not self._group.place.is_last_stage:
            self._send(hidden)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Compute ``[num_rows, vocab_size]`` float32, the same on each worker of the last stage.

        On other stages there are no columns.
        """
        if not self._group.place.is_last_stage:
            return hidden_states.new_empty((len(hidden_states), 0), dtype=torch.float32)
        logits = self._model.compute_logits(hidden_states)
        missing = self._columns - len(self._vocabulary)
        if missing:
            logits = functional.pad(logits, (0, missing))
        return self._group.gather_columns(logits)[:, : self._spec.vocab_size]

    def _hidden_shape(self) -> tuple[int, int]:
        return self._num_tokens, self._spec.hidden_size

    def _receive(self) -> Tensor:
        hidden = torch.empty(self._hidden_shape(), dtype=self._dtype, device=self._device)
        self._owes_receive = False
        return self._group.receive(hidden)

    def _send(self, hidden: Tensor) -> None:
        self._group.send(hidden)
        self._owes_send = False
