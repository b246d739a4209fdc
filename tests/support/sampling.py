"""Sampling parameters for tests of the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from octavo_kernels import SamplingMetadata


def make_sampling_metadata(num_rows: int, **values: ArrayLike) -> SamplingMetadata:
    """Parameters of `num_rows` rows; one value counts for all, what is not given is neutral."""
    defaults = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seeds": (0, np.int64),
        "positions": (0, np.int64),
    }
    return SamplingMetadata(
        **{
            name: np.broadcast_to(np.array(values.get(name, default), kind), num_rows).copy()
            for name, (default, kind) in defaults.items()
        }
    )
