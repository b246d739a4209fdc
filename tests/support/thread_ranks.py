"""The workers of one engine as threads of one process, so that many divisions are quick to try."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.parallel_weights import ParallelWeights
from octavo_worker.loading import WeightForm, load_weights
from octavo_worker.models import resolve_model_class
from octavo_worker.parallel_model import ParallelModel
from octavo_worker.parallel_state import ParallelPlace
from octavo_worker.sharding import (
    entries_of_rank,
    partial_names,
    spec_of_rank,
    vocabulary_of_rank,
)
from support.one_prompt import prompt_logits

CPU = torch.device("cpu")
SECONDS = 60.0


class ThreadRanks:
    """What the threads share."""

    def __init__(self, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
        self.places = [
            ParallelPlace(rank, tensor_parallel_size, pipeline_parallel_size)
            for rank in range(tensor_parallel_size * pipeline_parallel_size)
        ]
        self.shown: dict[int, Tensor] = {}
        self.barriers = [threading.Barrier(tensor_parallel_size) for _ in self.places]
        self.mail: list[SimpleQueue[Tensor]] = [SimpleQueue() for _ in self.places]

    def run(self, work: Callable[[ThreadGroup], Any]) -> list[Any]:
        """Run `work` for each rank at the same time; returns their results."""
        with ThreadPoolExecutor(len(self.places)) as pool:
            return list(pool.map(work, (ThreadGroup(place, self) for place in self.places)))


class ThreadGroup:
    """Takes the place of a `ParallelGroup`."""

    def __init__(self, place: ParallelPlace, ranks: ThreadRanks) -> None:
        self.place = place
        self._ranks = ranks

    def _everyones(self, x: Tensor) -> Iterable[Tensor]:
        ranks, place = self._ranks, self.place
        barrier = ranks.barriers[place.stage]
        ranks.shown[place.rank] = x.clone()
        barrier.wait(SECONDS)
        first = place.rank - place.tensor_rank
        shown = [ranks.shown[first + index] for index in range(place.tensor_parallel_size)]
        barrier.wait(SECONDS)
        return shown

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up."""
        first, *others = self._everyones(x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def gather_columns(self, x: Tensor) -> Tensor:
        """Join side by side."""
        return torch.cat(list(self._everyones(x)), dim=-1)

    def send(self, hidden: Tensor) -> None:
        """Send to the next stage."""
        target = self.place.rank + self.place.tensor_parallel_size
        self._ranks.mail[target].put(hidden.clone())

    def receive(self, out: Tensor) -> Tensor:
        """Receive from the stage before."""
        return out.copy_(self._ranks.mail[self.place.rank].get(timeout=SECONDS))


def divided_logits(
    spec: ModelSpec, path: Path, form: WeightForm, sizes: tuple[int, int], token_ids: list[int]
) -> list[Tensor]:
    """Compute a prompt's logits by several workers; those of each worker of the last stage."""

    def work(group: ThreadGroup) -> Tensor:
        place = group.place
        model_class = resolve_model_class(spec)
        weights = load_weights(spec, path, form, CPU, lambda *_: None, place=place)
        entries = entries_of_rank(spec, place, model_class.weight_layout)
        vocabulary = vocabulary_of_rank(spec, place)
        fake: Any = group
        mine = ParallelWeights(weights, fake, partial_names(entries), vocabulary)
        my_spec = spec_of_rank(spec, place)
        model: Any = ParallelModel(
            model_class(my_spec, mine, 128, CPU), spec, fake, torch.float32, CPU
        )
        return prompt_logits(model, my_spec, token_ids)

    results = ThreadRanks(*sizes).run(work)
    return results[-sizes[0] :]
