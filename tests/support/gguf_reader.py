"""The gguf package's reader, quicker."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


class QuickReader(gguf.GGUFReader):
    """Has the file as a plain array: a piece of a memmap takes ten times as long to make.

    There are some two million, for each word of the vocabulary several.
    """

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)
