"""Weights of which some layers' are in host memory, and fetched before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from torch import Tensor

from octavo_worker.layer_copies import LayerCopies
from octavo_worker.layers.parallel_weights import ParallelWeights
from octavo_worker.layers.weight import Weight, tensor_of
from octavo_worker.offload_plan import ALIGNMENT, NUM_STAGED, OffloadPlan

T = TypeVar("T")


class OffloadedWeights(Mapping[str, Weight]):
    """Loaded weights, those of the planned layers as views of staging buffers on the device.

    A view has a layer's numbers only between `before` and `after`. Layers take turns with the
    buffers: while one is computed, the next one is copied, in the last layer of a step that of
    the next step.

    Args:
        weights: By the model's names; what is offloaded is on the host, and taken out.
        plan: What is offloaded.
        copies: Of the device.
    """

    def __init__(self, weights: dict[str, Weight], plan: OffloadPlan, copies: LayerCopies) -> None:
        self._copies = copies
        self._order = sorted(plan.layers)
        self._place = {index: place for place, index in enumerate(self._order)}
        self._buffers = [
            copies.staging_buffer(plan.staged_bytes // NUM_STAGED) for _ in range(NUM_STAGED)
        ]
        self._held: list[int | None] = [None] * NUM_STAGED  # layer that each buffer has
        self._host: list[Tensor] = []
        self._weights = weights
        for place, index in enumerate(self._order):
            self._take(plan.layers[index], self._buffers[place % NUM_STAGED])

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def before(self, index: int) -> None:
        """Have a layer's weights in their views for the computation that follows."""
        place = self._place.get(index)
        if place is not None:
            self._fetch(place)
            self._copies.wait(place % len(self._buffers))

    def after(self, index: int) -> None:
        """Give a layer's views up, and fetch the next layer that has the same buffer."""
        place = self._place.get(index)
        if place is None:
            return
        number = place % len(self._buffers)
        self._copies.release(number)
        following = place + len(self._buffers)
        self._fetch(following if following < len(self._order) else number)

    def _fetch(self, place: int) -> None:
        number = place % len(self._buffers)
        if self._held[number] != place:
            host = self._host[place]
            self._copies.start(number, host, self._buffers[number][: len(host)])
            self._held[number] = place

    def _take(self, names: Sequence[str], buffer: Tensor) -> None:
        """Move a layer's tensors into one host buffer, and put views of `buffer` in their place."""
        tensors = [tensor_of(self._weights, name) for name in names]
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        host = self._copies.host_buffer(size)
        for name, tensor, start in zip(names, tensors, starts, strict=True):
            stop = start + tensor.nbytes
            host[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._weights[name] = buffer[start:stop].view(tensor.dtype).view(tensor.shape)
        self._host.append(host)


class FetchedLayers(Sequence[T]):
    """Layers that are fetched as they are iterated over: one at a time, in their order.

    Args:
        layers: All layers of a model, or of a stage.
        weights: Those of some of them.
    """

    def __init__(self, layers: Sequence[T], weights: OffloadedWeights) -> None:
        self._layers = layers
        self._weights = weights

    def __iter__(self) -> Iterator[T]:
        for index, layer in enumerate(self._layers):
            self._weights.before(index)
            yield layer
            self._weights.after(index)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)


def make_layers(weights: Mapping[str, Weight], count: int, make: Callable[[int], T]) -> Sequence[T]:
    """Make a model's layers; if weights are offloaded, each is fetched when its turn comes.

    Args:
        weights: Of the model.
        count: Layers.
        make: Makes one, by its index, from these weights.
    """
    offloaded = offload_of(weights)
    if offloaded is None:
        return [make(index) for index in range(count)]
    layers = []
    for index in range(count):
        offloaded.before(index)  # for what a layer works out of its weights once
        layers.append(make(index))
        offloaded.after(index)
    return FetchedLayers(layers, offloaded)


def offload_of(weights: Mapping[str, Weight]) -> OffloadedWeights | None:
    """Return the weights of which some are fetched, if there are any."""
    if isinstance(weights, ParallelWeights):
        weights = weights.weights
    return weights if isinstance(weights, OffloadedWeights) else None
