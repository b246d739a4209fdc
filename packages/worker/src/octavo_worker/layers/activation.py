"""Activations, by the names that configurations give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from octavo_core.errors import ModelError
from octavo_core.model_spec import ModelSpec
from octavo_kernels import gelu_and_mul, silu_and_mul

Activation = Callable[[Tensor], Tensor]

_gelu_tanh = partial(functional.gelu, approximate="tanh")
# Hendrycks and Gimpel's approximation has several names.
_TANH_NAMES = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")

GATED: dict[str, Activation] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": gelu_and_mul,
    **dict.fromkeys(_TANH_NAMES, partial(gelu_and_mul, approximate="tanh")),
}
"""``[num_tokens, 2 * width]``, the gate first, to ``[num_tokens, width]``."""

PLAIN: dict[str, Activation] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    **dict.fromkeys(_TANH_NAMES, _gelu_tanh),
}
"""Number by number."""

# Names that `octavo_kernels.Decoder` and `octavo_kernels.Experts` have for gated ones.
KERNEL_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    **dict.fromkeys(_TANH_NAMES, "gelu_tanh"),
}


def check_activation(spec: ModelSpec, known: dict[str, Activation]) -> None:
    """Raise if a model's activation is none of `known`.

    Raises:
        ModelError: It isn't; the message lists them.
    """
    if spec.hidden_act not in known:
        raise ModelError(
            f"hidden_act {spec.hidden_act!r} is not supported for {spec.architecture}; "
            f"supported: {', '.join(known)}.",
            field="hidden_act",
        )
