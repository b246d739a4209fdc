"""The weights of one worker among several, and what follows for the layers that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo_worker.layers.weight import Weight
from octavo_worker.parallel_state import ParallelGroup


@dataclass(frozen=True, eq=False)
class ParallelWeights(Mapping[str, Weight]):
    """A worker's part of the loaded weights.

    Attributes:
        weights: By the model's names.
        group: The other workers.
        partial: Names of matrices of which this worker has some inputs, so that products are
            parts of a sum.
        vocabulary: The rows of embedding and head that are here.
    """

    weights: Mapping[str, Weight]
    group: ParallelGroup
    partial: frozenset[str]
    vocabulary: range

    def __getitem__(self, name: str) -> Weight:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def group_of(weights: Mapping[str, Weight]) -> ParallelGroup | None:
    """Return the other workers, if there are any."""
    return weights.group if isinstance(weights, ParallelWeights) else None


def is_partial(weights: Mapping[str, Weight], name: str) -> bool:
    """Whether a matrix has only some of its inputs here."""
    return isinstance(weights, ParallelWeights) and name in weights.partial
