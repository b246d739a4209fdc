"""How many bytes a quantized weight takes, with its share of scales and zero points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo_core.errors import ModelError
from octavo_core.gguf import GGUF_TYPES


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """One way to store the weights of linear layers.

    Attributes:
        method: Its name, for example ``gptq``.
        weight_bytes: Bytes of one weight, scales and zero points included; None if this
            method is not known here.
        only_experts: Only the experts of a mixture are stored so.
        embeddings: The embedding and the language-model head are stored so too.
    """

    method: str
    weight_bytes: float | None
    only_experts: bool = False
    embeddings: bool = False


def _grouped(bits: int, group_size: int, scale_bytes: float, zero_bits: int = 0) -> float:
    """Bytes of a weight of `bits` whose group shares a scale and a zero point."""
    return bits / 8 + (scale_bytes + zero_bits / 8) / group_size


def _named() -> dict[str, Quantization]:
    """Return the methods that ``--quantization`` can name."""
    weight_bytes = {
        "awq": _grouped(4, 128, 2, 4),
        "bitsandbytes": _grouped(4, 64, 4),
        "fp8": 1.0,
        "gptq": _grouped(4, 128, 2, 4),
        "int4": _grouped(4, 128, 2),
        "int8": 1.0,
        "mxfp4": _grouped(4, 32, 1),
        "nvfp4": _grouped(4, 16, 1),
    }
    methods = {
        name: Quantization(method=name, weight_bytes=size) for name, size in weight_bytes.items()
    }
    for kind in GGUF_TYPES.values():
        name = kind.name.lower()
        if kind.block_weights > 1 and name not in methods:  # quantized, and no intermediate type
            size = kind.block_bytes / kind.block_weights
            methods[name] = Quantization(method=name, weight_bytes=size, embeddings=True)
    return methods


QUANTIZATIONS = _named()


def quantization_from_config(config: Mapping[str, Any]) -> Quantization | None:
    """Read the ``quantization_config`` of a config.json.

    Args:
        config: Contents of config.json.

    Returns:
        None if the weights are not quantized. A method that is not known here has no
        ``weight_bytes``.

    Raises:
        ModelError: The entry is no object, or a weight would have no bits, or more than it has
            plainly.
    """
    name = "quantization_config"
    if not config.get(name) and config.get("compression_config") is not None:
        name = "compression_config"
    entry = config.get(name)
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ModelError(
            f"config.json: {name} is {str(entry)[:60]!r}; it must be an object with a "
            f"quant_method.",
            field=name,
        )
    if not entry:
        return None
    method = str(entry.get("quant_method") or entry.get("quant_algo") or "unknown").lower()
    if method in ("gptq", "awq"):
        bits = _int(entry, "bits", _int(entry, "w_bit", 4))
        group = _int(entry, "group_size", 128)
        if not 1 <= bits <= 16:
            raise ModelError(
                f"config.json: quantization_config says bits={bits}; it must be from 1 to 16.",
                field="quantization_config",
            )
        # -1: one group for each column, whose scale is next to nothing.
        size = _grouped(bits, group, 2, bits) if group > 0 else bits / 8
        return Quantization(method=method, weight_bytes=size)
    if method == "bitsandbytes":
        if entry.get("load_in_8bit"):
            return Quantization(method=method, weight_bytes=1.0)
        return QUANTIZATIONS[method]
    if method == "mxfp4":  # gpt-oss
        return msgspec.structs.replace(QUANTIZATIONS[method], only_experts=True)
    if method in ("compressed-tensors", "quark"):
        return Quantization(method=method, weight_bytes=_compressed(entry))
    if method.startswith("modelopt"):
        algorithm = str(entry.get("quant_algo", "")).lower()
        method = "nvfp4" if "nvfp4" in algorithm or method.endswith("fp4") else "fp8"
    known = QUANTIZATIONS.get(method.replace("_", ""), QUANTIZATIONS.get(method))
    return known or Quantization(method=method, weight_bytes=None)


def _compressed(entry: Mapping[str, Any]) -> float | None:
    """Bytes of a weight in the first group of a compressed-tensors configuration."""
    groups = entry.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            bits, size = _int(weights, "num_bits", 8), _int(weights, "group_size", 0)
            return _grouped(bits, size, 2) if size > 0 else bits / 8
    return None


def _int(entry: Mapping[str, Any], key: str, default: int) -> int:
    value = entry.get(key)
    return value if isinstance(value, int) else default
