"""Heads that score classes, on the hidden state of one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.linear import Linear
from octavo_worker.layers.weight import Weight
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart


class Head(Protocol):
    """From hidden states to numbers of classes."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Make ``[num_rows, num_labels]`` of ``[num_rows, hidden_size]``."""
        ...


class ClassificationHead:
    """One projection, or two with a hyperbolic tangent between.

    Args:
        weights: Loaded weights.
        dense: Name of the first projection; None if there is but one.
        output: Name of the last.
    """

    def __init__(self, weights: Mapping[str, Weight], dense: str | None, output: str) -> None:
        self._dense = None if dense is None else Linear.of(weights, dense)
        self._output = Linear.of(weights, output)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Make ``[num_rows, num_labels]`` of ``[num_rows, hidden_size]``."""
        if self._dense is not None:
            hidden = torch.tanh(self._dense(hidden))
        return self._output(hidden)


_DENSE = {"bert": "bert.pooler.dense", "roberta": "classifier.dense"}
_OUTPUT = {"bert": "classifier", "roberta": "classifier.out_proj", "decoder": "score"}


def head_layout(spec: ModelSpec, kind: str, num_labels: int) -> list[WeightEntry]:
    """List the tensors of a head.

    Args:
        spec: Hyper-parameters.
        kind: ``bert``, ``roberta`` or ``decoder``.
        num_labels: Classes.
    """
    has_bias = kind != "decoder"
    entries = _linear(_OUTPUT[kind], num_labels, spec.hidden_size, has_bias)
    if kind in _DENSE:
        entries += _linear(_DENSE[kind], spec.hidden_size, spec.hidden_size, has_bias)
    return entries


def make_head(weights: Mapping[str, Weight], kind: str) -> ClassificationHead:
    """Make the head of `head_layout`."""
    return ClassificationHead(weights, _DENSE.get(kind), _OUTPUT[kind])


def _linear(name: str, rows: int, columns: int, bias: bool) -> list[WeightEntry]:
    # Small, and used for a row a text: never packed.
    parts = [WeightPart(f"{name}.weight", (rows, columns))]
    parts += [WeightPart(f"{name}.bias", (rows,))] if bias else []
    return [WeightEntry(part.name, (part,), is_plain=True) for part in parts]
