"""Divides a model among workers: its sizes, and the tensors of its checkpoint.

What is divided follows from the definition itself: it is asked for its tensors twice, with the
model's sizes and with a worker's (a share of the heads and of the feed-forward), and where a
dimension comes out smaller, each worker has a piece of it. This is the division of Megatron-LM
(Shoeybi et al. 2019, arXiv 1909.08053): the first projection of a pair by outputs, the second by
inputs, so that two sums are needed in a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from octavo_core.errors import ConfigError
from octavo_core.kv_cache_group import KVCacheGroup
from octavo_core.memory_planner import check_parallel
from octavo_core.model_spec import ModelSpec
from octavo_worker.layers.piece import Piece
from octavo_worker.layers.weight_entry import WeightEntry, WeightPart
from octavo_worker.models.registry import MODELS
from octavo_worker.parallel_state import ParallelPlace

Layout = Callable[[ModelSpec], list[WeightEntry]]

_LAYER = re.compile(r"\.(layers|h)\.(\d+)\.")
_DIVIDED = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_division(spec: ModelSpec, place: ParallelPlace) -> None:
    """Refuse parallel sizes that don't divide a model.

    Raises:
        ConfigError: The message names the size, and what it does not divide.
    """
    size = place.tensor_parallel_size
    _check_family(spec, place)
    check_parallel(spec, place)
    for count in {spec.num_key_value_heads, *spec.layer_num_kv_heads} - {0}:
        if count % size and size % count:
            raise _does_not_divide(size, f"{count} key-value heads, nor is a multiple of them")
    for name in _DIVIDED:
        value = getattr(spec, name)
        if value % size:
            raise _does_not_divide(size, f"{name} of {value}")


def _check_family(spec: ModelSpec, place: ParallelPlace) -> None:
    """Refuse models whose definitions can't be divided."""
    for field, size in (
        ("tensor_parallel_size", place.tensor_parallel_size),
        ("pipeline_parallel_size", place.pipeline_parallel_size),
    ):
        if size > 1 and spec.architecture not in MODELS:
            raise ConfigError(
                f"{field} is {size}, but {spec.architecture} can't be divided: it runs through "
                f"transformers; those that can are {', '.join(sorted(MODELS))}.",
                field=field,
            )
    if place.pipeline_parallel_size > 1 and spec.scale_attn_by_inverse_layer_idx:
        raise ConfigError(
            f"pipeline_parallel_size is {place.pipeline_parallel_size}, but the model's "
            f"scale_attn_by_inverse_layer_idx needs layers counted from the first, which a stage "
            f"doesn't; use --tensor-parallel-size.",
            field="pipeline_parallel_size",
        )


def spec_of_rank(spec: ModelSpec, place: ParallelPlace) -> ModelSpec:
    """Return the sizes of the part of a model that one worker has.

    Key-value heads that are fewer than the workers are on several of them.
    """
    layers = place.layers(spec.num_hidden_layers)
    of_stage: dict[str, Any] = {
        name: getattr(spec, name)[layers.start : layers.stop]
        for name in ("layer_kinds", "layer_num_kv_heads")
    }
    if place.pipeline_parallel_size > 1:
        # Block tables are the whole model's, also those that no layer of this stage has.
        of_stage["stage_kv_cache_groups"] = tuple(
            KVCacheGroup(
                tuple(index - layers.start for index in group.layers if index in layers),
                group.window,
            )
            for group in spec.kv_cache_groups()
        )
    return msgspec.structs.replace(
        _share(msgspec.structs.replace(spec, num_hidden_layers=len(layers), **of_stage), place),
        moe_layers=tuple(index - layers.start for index in spec.moe_layers if index in layers),
    )


def entries_of_rank(spec: ModelSpec, place: ParallelPlace, layout: Layout) -> list[WeightEntry]:
    """List the tensors that one worker reads, under the names that a model of its sizes has.

    Args:
        spec: Of the whole model.
        place: Of the worker.
        layout: The model definition's `weight_layout`.
    """
    vocabulary = vocabulary_of_rank(spec, place)
    pairs = zip(layout(spec), layout(_share(spec, place)), strict=True)
    entries = [_cut(whole, part, place, vocabulary) for whole, part in pairs]
    return _entries_of_stage(entries, place, spec.num_hidden_layers)


def vocabulary_of_rank(spec: ModelSpec, place: ParallelPlace) -> range:
    """Return the tokens whose rows of embedding and head are on one worker."""
    size = -(-spec.vocab_size // place.tensor_parallel_size)
    first = size * place.tensor_rank
    return range(min(first, spec.vocab_size), min(first + size, spec.vocab_size))


def partial_names(entries: list[WeightEntry]) -> frozenset[str]:
    """Return the names of matrices that are divided by inputs."""
    return frozenset(
        entry.name
        for entry in entries
        if any(part.piece is not None and part.piece.dim == part.input_dim for part in entry.parts)
    )


def _share(spec: ModelSpec, place: ParallelPlace) -> ModelSpec:
    """Divide heads and feed-forwards among the workers of a stage."""
    size = place.tensor_parallel_size
    return msgspec.structs.replace(
        spec,
        num_attention_heads=spec.num_attention_heads // size,
        num_key_value_heads=max(spec.num_key_value_heads // size, 1),
        layer_num_kv_heads=tuple(
            max(count // size, 1) if count else 0 for count in spec.layer_num_kv_heads
        ),
        **{name: getattr(spec, name) // size for name in _DIVIDED},
    )


def _cut(
    whole: WeightEntry, share: WeightEntry, place: ParallelPlace, vocabulary: range
) -> WeightEntry:
    if whole.is_vocabulary:
        if place.tensor_parallel_size == 1:
            return whole
        piece = Piece(0, vocabulary.start, vocabulary.stop)
        return whole._replace(parts=tuple(part._replace(piece=piece) for part in whole.parts))
    parts = zip(whole.parts, share.parts, strict=True)
    return whole._replace(
        parts=tuple(piece for one, other in parts for piece in _cut_part(one, other, place))
    )


def _cut_part(whole: WeightPart, share: WeightPart, place: ParallelPlace) -> list[WeightPart]:
    """Cut along the dimension in which a share is smaller; if there is none, all have it whole.

    Of projections that are stored as one each is cut by itself, so that there are several pieces.
    """
    dims = [dim for dim, size in enumerate(whole.shape) if size != share.shape[dim]]
    if not dims:
        return [whole]
    (dim,) = dims
    pieces: list[WeightPart] = []
    offset = 0
    for all_of_it, mine in zip(
        whole.sections or (whole.shape[dim],), share.sections or (share.shape[dim],), strict=True
    ):
        count = all_of_it // mine  # fewer than workers, if several have the same
        start = offset + mine * (place.tensor_rank * count // place.tensor_parallel_size)
        pieces.append(whole._replace(piece=Piece(dim, start, start + mine), sections=()))
        offset += all_of_it
    return pieces


def _entries_of_stage(
    entries: list[WeightEntry], place: ParallelPlace, num_layers: int
) -> list[WeightEntry]:
    """Keep what one stage needs, its layers counted from zero.

    What stands before the layers is the first stage's, and what stands behind them the last
    one's, with what that is tied to.
    """
    if place.pipeline_parallel_size == 1:
        return entries
    layers = place.layers(num_layers)
    tied_to = {entry.tied_to for entry in entries if place.is_last_stage}
    kept: list[WeightEntry] = []
    is_before = True
    for entry in entries:
        found = _LAYER.search(entry.name)
        if found is None:
            needed = place.is_first_stage if is_before else place.is_last_stage
            if needed or entry.name in tied_to:
                kept.append(entry)
            continue
        is_before = False
        if int(found[2]) in layers:
            index = int(found[2]) - layers.start
            kept.append(entry._replace(name=_LAYER.sub(rf".\1.{index}.", entry.name, count=1)))
    return kept


def _does_not_divide(size: int, what: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size is {size}, which does not divide the model's {what}.",
        field="tensor_parallel_size",
    )
