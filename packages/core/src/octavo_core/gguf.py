"""A bounds-checked reader of GGUF headers: metadata and the table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little-endian). Tensor data is not read here; `TensorInfo` tells where it lies, and
every offset and size is proven to be inside the file before it is handed out.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from octavo_core.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4


class GGUFType(NamedTuple):
    """A tensor type: how many weights share a block, and the block's bytes."""

    name: str
    block_weights: int
    block_bytes: int


# Type ids of the format. Names and sizes only; which of them can be computed
# with is up to the loader, so that a refusal can say the name.
GGUF_TYPES = {
    0: GGUFType("F32", 1, 4),
    1: GGUFType("F16", 1, 2),
    2: GGUFType("Q4_0", 32, 18),
    3: GGUFType("Q4_1", 32, 20),
    6: GGUFType("Q5_0", 32, 22),
    7: GGUFType("Q5_1", 32, 24),
    8: GGUFType("Q8_0", 32, 34),
    9: GGUFType("Q8_1", 32, 36),
    10: GGUFType("Q2_K", 256, 84),
    11: GGUFType("Q3_K", 256, 110),
    12: GGUFType("Q4_K", 256, 144),
    13: GGUFType("Q5_K", 256, 176),
    14: GGUFType("Q6_K", 256, 210),
    15: GGUFType("Q8_K", 256, 292),
    16: GGUFType("IQ2_XXS", 256, 66),
    17: GGUFType("IQ2_XS", 256, 74),
    18: GGUFType("IQ3_XXS", 256, 98),
    19: GGUFType("IQ1_S", 256, 50),
    20: GGUFType("IQ4_NL", 32, 18),
    21: GGUFType("IQ3_S", 256, 110),
    22: GGUFType("IQ2_S", 256, 82),
    23: GGUFType("IQ4_XS", 256, 136),
    24: GGUFType("I8", 1, 1),
    25: GGUFType("I16", 1, 2),
    26: GGUFType("I32", 1, 4),
    27: GGUFType("I64", 1, 8),
    28: GGUFType("F64", 1, 8),
    29: GGUFType("IQ1_M", 256, 56),
    30: GGUFType("BF16", 1, 2),
    34: GGUFType("TQ1_0", 256, 54),
    35: GGUFType("TQ2_0", 256, 66),
    39: GGUFType("MXFP4", 32, 17),
}


class TensorInfo(NamedTuple):
    """One tensor of a GGUF file.

    Attributes:
        shape: Outermost dimension first, as torch writes it (the file has it reversed).
        type: Its `GGUFType`.
        offset: Byte offset from the start of the file.
        num_bytes: Bytes of its data.
    """

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    offset: int
    num_bytes: int


class GGUFHeader(NamedTuple):
    """Metadata by key, and tensors by name, of one file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf_header(path: str | Path, *, with_vocabulary: bool = True) -> GGUFHeader:
    """Read a file's metadata and tensor table.

    Args:
        path: The file.
        with_vocabulary: Whether arrays of strings are read, which only a tokenizer needs and
            take nearly all the time; else they are empty.

    Raises:
        ModelError: The file can't be read, is no GGUF file, is cut short, or states
            sizes that are not inside it. The message names the file and the place.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ModelError(f"{path} is too short to be a GGUF file.", field=str(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, with_vocabulary).read()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}.", field=str(path)) from error


class _Reader:
    """A cursor over the mapped file that never leaves it."""

    def __init__(self, path: Path, data: mmap.mmap, with_vocabulary: bool) -> None:
        self._path = path
        self._with_vocabulary = with_vocabulary
        self._data = data
        self._size = len(data)
        self._position = 0
        self._place = "the header"

    def read(self) -> GGUFHeader:
        if self._take(4) != MAGIC:
            raise self._error("it does not start with 'GGUF'")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._error(f"its GGUF version is {version}, and only 2 and 3 can be read")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        # The smallest entry of either table has more than 12 bytes.
        if (num_tensors + num_pairs) * 12 > self._size:
            raise self._error(
                f"it states {num_tensors} tensors and {num_pairs} metadata entries, more than its "
                f"{self._size} bytes can hold; the file is cut short or damaged"
            )
        metadata = self._metadata(num_pairs)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, not a power of two")
        return GGUFHeader(self._path, metadata, self._tensors(num_tensors, alignment))

    def _metadata(self, num_pairs: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_pairs):
            self._place = f"metadata entry {index}"
            key = self._string()
            self._place = f"metadata {key!r}"
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        entries = []
        for index in range(num_tensors):
            self._place = f"tensor entry {index}"
            name = self._string()
            self._place = f"tensor {name!r}"
            num_dimensions = self._scalar("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise self._error(f"it has {num_dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
            type_id, offset = self._scalar("I"), self._scalar("Q")
            entries.append((name, shape, type_id, offset))
        start = _align(self._position, alignment)
        end = 0  # of the tensors so far; they lie one after the other, as llama.cpp asks for too
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            self._place = f"tensor {name!r}"
            if name in tensors:
                raise self._error("it is there twice")
            if offset % alignment:
                raise self._error(f"its offset {offset} is not a multiple of {alignment}")
            tensors[name] = self._tensor(name, shape, type_id, start + offset)
            if offset != end:
                raise self._error(
                    f"its offset is {offset}, but what is before it ends at {end}: the type, shape "
                    f"or offset of one of them is wrong"
                )
            end = _align(offset + tensors[name].num_bytes, alignment)
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        kind = GGUF_TYPES.get(type_id)
        if kind is None:
            raise self._error(f"its type id {type_id} is unknown")
        num_weights = 1
        for dimension in shape:
            if dimension == 0:
                raise self._error(f"its shape is {list(shape)}")
            num_weights *= dimension
        if shape[-1] % kind.block_weights:
            raise self._error(
                f"its rows of {shape[-1]} weights are not whole {kind.name} blocks "
                f"of {kind.block_weights}"
            )
        num_bytes = num_weights // kind.block_weights * kind.block_bytes
        if offset + num_bytes > self._size:
            raise self._error(
                f"its data would end at byte {offset + num_bytes}, but the file has {self._size} "
                f"bytes; the file is cut short or damaged"
            )
        return TensorInfo(name, shape, kind, offset, num_bytes)

    def _value(self, type_id: int, depth: int = 0) -> Any:
        if type_id in _SCALARS:
            return self._scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(depth)
        raise self._error(f"its value type {type_id} is unknown or nested too deep")

    def _array(self, depth: int) -> list[Any]:
        item_type, length = self._scalar("I"), self._scalar("Q")
        if item_type in _SCALARS:
            code = _SCALARS[item_type]
            item_bytes = struct.calcsize("<" + code)
            return list(struct.unpack(f"<{length}{code}", self._take(length * item_bytes)))
        if length * 8 > self._size:  # a string or array has at least its own 8-byte length
            raise self._error(
                f"it states {length} items, more than the file's {self._size} bytes can hold; the "
                f"file is cut short or damaged"
            )
        if item_type == _STRING and not self._with_vocabulary:
            return self._skip_strings(length)
        if item_type == _STRING:
            return self._strings(length)
        return [self._value(item_type, depth + 1) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        """Read as `_string` does, in one loop: a vocabulary has 100,000, which took 0.2 s."""
        data, size, unpack = self._data, self._size, _LENGTH.unpack_from
        position = self._position
        strings = []
        try:
            for _ in range(length):
                start = position + _LENGTH.size
                position = start + unpack(data, position)[0] if start <= size else size + 1
                if position > size:
                    raise self._cut_short()
                strings.append(data[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._error("it is not valid UTF-8") from error
        self._position = position
        return strings

    def _skip_strings(self, length: int) -> list[str]:
        data, last, unpack = self._data, self._size - _LENGTH.size, _LENGTH.unpack_from
        position = self._position
        for _ in range(length):
            if position > last:
                raise self._cut_short()
            position += _LENGTH.size + unpack(data, position)[0]
        if position > self._size:
            raise self._cut_short()
        self._position = position
        return []

    def _string(self) -> str:
        try:
            return self._take(self._scalar("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error("it is not valid UTF-8") from error

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > self._size:
            raise self._cut_short()
        chunk = self._data[self._position : end]
        self._position = end
        return chunk

    def _cut_short(self) -> ModelError:
        return self._error("the file ends inside it; the file is cut short or damaged")

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self._path}: {self._place}: {reason}.", field=str(self._path))


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
