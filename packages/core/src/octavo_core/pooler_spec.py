"""What a model is made for beside generating text, read from its files.

An encoder makes embeddings, a model with a head scores of classes, and sentence-transformers
writes down in ``modules.json`` how the vectors of a text's tokens become one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo_core.config import EngineConfig
from octavo_core.errors import ConfigError, ModelError
from octavo_core.model_spec import ModelSpec, read_json
from octavo_core.pooling_params import PoolingTask

PoolingType = Literal["last", "mean", "cls"]
ScoreActivation = Literal["identity", "sigmoid", "softmax", "tanh"]

_CLASSIFIER = "ForSequenceClassification"
_MAX_LABELS = 65536
# Keys of 1_Pooling/config.json; each may be true.
_POOLING_MODES: dict[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_POOLING_NAMES: dict[str, PoolingType] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
# Modules of sentence-transformers that are computed here, by the end of their class's name.
_MODULES = ("Transformer", "Pooling", "Normalize")
_ACTIVATIONS: dict[str, ScoreActivation] = {
    "identity": "identity",
    "linear": "identity",
    "sigmoid": "sigmoid",
    "softmax": "softmax",
    "tanh": "tanh",
}
_PROBLEM_TYPES: dict[str, ScoreActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


class PoolerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors are made of a text.

    Attributes:
        is_encoder: Every token sees every other, so a text is computed as a whole, and
            nothing of it is kept in a KV cache.
        pooling: Which tokens' hidden states count: the last one's, the first one's (``cls``),
            or the mean of all.
        normalize: Embeddings are brought to a length of one.
        labels: Names of the classes; empty for a model that makes embeddings.
        activation: From the head's numbers to scores of classes.
        dimensions: To how many numbers an embedding may be cut; empty means to any.
        is_matryoshka: Whether it may be cut at all.
    """

    is_encoder: bool = False
    pooling: PoolingType = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: ScoreActivation = "softmax"
    dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False

    @property
    def is_classifier(self) -> bool:
        """Whether there is a head for classes."""
        return bool(self.labels)

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What can be asked for."""
        if self.is_classifier:
            return ("classify", "token_classify")
        return ("embed", "token_embed")

    def needs_all_tokens(self, task: PoolingTask) -> bool:
        """Whether a task needs the hidden states of all tokens, and not of the last alone."""
        return task in ("token_embed", "token_classify") or self.pooling != "last"


def read_pooler_spec(config: EngineConfig, spec: ModelSpec) -> PoolerSpec | None:
    """Find out whether a model pools, and how.

    Args:
        config: All settings; ``model_path`` is set.
        spec: The model's hyper-parameters.

    Returns:
        None for a model that generates.

    Raises:
        ConfigError: ``runner`` asks for what the model isn't.
        ModelError: An entry of the model's files is wrong, or asks for what isn't there.
    """
    path = Path(config.model_path)
    is_folder = bool(config.model_path) and path.is_dir()
    runner = config.model.runner
    modules = _read_modules(path) if is_folder and runner != "generate" else None
    if runner == "generate":
        _check_generates(config, spec)
    wants_vectors = is_made_for_pooling(spec) or modules is not None
    if runner == "generate" or (runner == "auto" and not wants_vectors):
        return None
    if config.parallel.world_size > 1:
        raise ConfigError(
            f"tensor_parallel_size times pipeline_parallel_size is {config.parallel.world_size}, "
            f"but a pooling model runs on one worker; use --data-parallel-size for more.",
            field="tensor_parallel_size",
        )
    raw = read_json(path / "config.json") if is_folder else {}
    pooling = config.model.pooling_type
    found = {
        "is_encoder": spec.is_encoder,
        "pooling": "cls" if spec.is_encoder else "last",
        **_matryoshka(raw),
        **_classes(raw, spec),
        **_pooling_of(path, modules),
        **({} if pooling == "auto" else {"pooling": pooling}),
    }
    if raw.get("is_causal") is False and not spec.is_encoder:
        raise _unsupported("config.json says is_causal: false, and attention to both sides")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise _unsupported(f"position_embedding_type {raw['position_embedding_type']!r}")
    return msgspec.convert(found, PoolerSpec)


def is_made_for_pooling(spec: ModelSpec) -> bool:
    """Whether an architecture's name says that it makes no text."""
    name = spec.architecture
    if name.endswith("LMHeadModel"):  # GPT-2's, which is a causal model
        return False
    return spec.is_encoder or name.endswith((_CLASSIFIER, "Model"))


def _check_generates(config: EngineConfig, spec: ModelSpec) -> None:
    # The body of a causal model is saved under a name of its own and may well be all of it.
    if is_made_for_pooling(spec):
        raise ConfigError(
            f"runner is generate (from {config.source_of('runner')}), but {spec.architecture} has "
            f"no language-model head; use --runner pooling or auto.",
            field="runner",
        )


def _read_modules(path: Path) -> list[dict[str, Any]] | None:
    """Read what sentence-transformers puts behind each other; None where it wrote nothing."""
    file = path / "modules.json"
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}.", field=file.name) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is no list of modules: {error}.", field=file.name) from error
    for module in modules:
        if not _is(module, *_MODULES):
            raise _unsupported(f"modules.json has {module.get('type')!r}")
    return modules if any(_is(module, "Pooling") for module in modules) else None


def _is(module: Mapping[str, Any], *names: str) -> bool:
    return str(module.get("type")).rsplit(".", 1)[-1] in names


def _pooling_of(path: Path, modules: list[dict[str, Any]] | None) -> dict[str, Any]:
    if modules is None:
        return {}
    folder = next(str(module.get("path")) for module in modules if _is(module, "Pooling"))
    # The name comes from a file, and leads nowhere else.
    if Path(folder).name != folder:
        raise ModelError(f"modules.json has the path {folder!r}.", field="modules.json")
    config = read_json(path / folder / "config.json")
    modes = [mode for key, mode in _POOLING_MODES.items() if config.get(key) is True]
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [_POOLING_NAMES[named]] if named in _POOLING_NAMES else []
    others = [key for key, value in config.items() if value is True and _is_mode(key)]
    if len(modes) != 1 or set(others) - _POOLING_MODES.keys():
        raise _unsupported(f"{folder}/config.json asks for {named or ', '.join(others) or 'none'}")
    return {
        "pooling": modes[0],
        "normalize": any(_is(module, "Normalize") for module in modules),
    }


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")


def _matryoshka(raw: Mapping[str, Any]) -> dict[str, Any]:
    dimensions = raw.get("matryoshka_dimensions") or ()
    return {
        "dimensions": tuple(dimensions),
        "is_matryoshka": bool(dimensions) or raw.get("is_matryoshka") is True,
    }


def _classes(raw: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    if not spec.architecture.endswith(_CLASSIFIER):
        return {}
    names = raw.get("id2label")
    # transformers leaves two classes without names out of the file.
    count = len(names) if isinstance(names, Mapping) and names else raw.get("num_labels") or 2
    if not isinstance(count, int) or not 0 < count <= _MAX_LABELS:
        raise ModelError(f"config.json: num_labels is {count!r}.", field="num_labels")
    labels = [f"LABEL_{index}" for index in range(count)]
    for key, name in names.items() if isinstance(names, Mapping) else ():
        if not str(key).isdecimal() or int(key) >= count:
            raise ModelError(f"config.json: id2label has the key {key!r}.", field="id2label")
        labels[int(key)] = str(name)
    return {"labels": tuple(labels), "activation": _activation(raw, count)}


def _activation(raw: Mapping[str, Any], num_labels: int) -> ScoreActivation:
    """Choose as sentence-transformers' cross-encoders do, then as the problem's type says."""
    own = raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    name = name or raw.get("sbert_ce_default_activation_function")
    if isinstance(name, str):
        activation = _ACTIVATIONS.get(name.rsplit(".", 1)[-1].lower())
        if activation is None:
            raise _unsupported(f"config.json has the activation {name!r}")
        return activation
    default: ScoreActivation = "softmax" if num_labels > 1 else "sigmoid"
    return _PROBLEM_TYPES.get(str(raw.get("problem_type")), default)


def _unsupported(what: str) -> ModelError:
    return ModelError(f"{what}, which is not supported; see docs/pooling.md.", field="model")
