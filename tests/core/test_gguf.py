import random
from pathlib import Path

import pytest

from octavo_core.errors import ModelError
from octavo_core.gguf import read_gguf_header
from support.gguf_writer import llama_metadata, write_gguf

F32, Q4_1 = 0, 3


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_gguf(
        tmp_path / "good.gguf",
        {**llama_metadata(), "names": ["a", "bé"], "numbers": [1.5, 2.0], "flag": True, "none": []},
        {"first": ((3, 2), F32, bytes(24)), "second": ((2, 64), Q4_1, bytes(80))},
    )


def test_metadata_and_tensors(good: Path) -> None:
    header = read_gguf_header(good)
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["names"] == ["a", "bé"]
    assert header.metadata["numbers"] == [1.5, 2.0]
    assert header.metadata["flag"] is True
    assert header.metadata["none"] == []
    first, second = header.tensors.values()
    assert (first.name, first.shape, first.type.name, first.num_bytes) == (
        "first",
        (3, 2),
        "F32",
        24,
    )
    assert (second.shape, second.type.name, second.num_bytes) == ((2, 64), "Q4_1", 80)
    assert first.offset % 32 == 0
    assert second.offset == first.offset + 32
    assert second.offset + second.num_bytes <= good.stat().st_size


@pytest.mark.parametrize(
    ("shape", "type_id", "reason"),
    [
        ((2, 2), 99, "type id 99"),
        ((2, 33), Q4_1, "not whole Q4_1 blocks"),
        ((1 << 40, 1 << 30), F32, "cut short"),
        ((0, 4), F32, r"\[0, 4\]"),
        ((1,) * 5, F32, "5 dimensions"),
    ],
)
def test_bad_tensors_are_refused_by_name(
    tmp_path: Path, shape: tuple[int, ...], type_id: int, reason: str
) -> None:
    path = write_gguf(tmp_path / "bad.gguf", {}, {"the.tensor": (shape, type_id, bytes(64))})
    with pytest.raises(ModelError, match=reason) as refused:
        read_gguf_header(path)
    assert "the.tensor" in str(refused.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="does not start with 'GGUF'"):
        read_gguf_header(path)
    path.write_bytes(b"GG")
    with pytest.raises(ModelError, match="too short"):
        read_gguf_header(path)
    with pytest.raises(ModelError, match="can't be read"):
        read_gguf_header(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="version is 7"):
        read_gguf_header(write_gguf(path, {}, {}, version=7))


def test_a_header_without_its_vocabulary(good: Path) -> None:
    whole, header = read_gguf_header(good), read_gguf_header(good, with_vocabulary=False)
    assert header == whole._replace(metadata=whole.metadata | {"names": []})


@pytest.mark.parametrize("with_vocabulary", [True, False])
def test_every_truncation_is_refused(good: Path, tmp_path: Path, with_vocabulary: bool) -> None:
    content = good.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(len(content) - 16):  # the last 16 bytes are padding
        path.write_bytes(content[:length])
        with pytest.raises(ModelError):
            read_gguf_header(path, with_vocabulary=with_vocabulary)


@pytest.mark.parametrize("with_vocabulary", [True, False])
def test_flipped_bytes_never_crash(good: Path, tmp_path: Path, with_vocabulary: bool) -> None:
    content = good.read_bytes()
    path = tmp_path / "flipped.gguf"
    generator = random.Random(0)
    num_refused = 0
    for _ in range(1000):
        mutant = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            mutant[generator.randrange(len(mutant))] = generator.randrange(256)
        path.write_bytes(mutant)
        try:
            header = read_gguf_header(path, with_vocabulary=with_vocabulary)
        except ModelError:
            num_refused += 1
            continue
        for tensor in header.tensors.values():
            assert tensor.offset + tensor.num_bytes <= len(content)
    assert num_refused > 100


@pytest.mark.parametrize("num_bytes", [20, 80], ids=["overlap", "gap"])
def test_tensors_lie_one_after_the_other(good: Path, num_bytes: int) -> None:
    """Where they don't a type or shape is wrong, and numbers would be read that are none."""
    tensors = {
        "first": ((12,), F32, bytes(num_bytes)),  # 48 bytes, for which there are 64
        "second": ((2, 64), Q4_1, bytes(80)),
    }
    with pytest.raises(ModelError, match=r"'second': its offset is (32|96), but .* ends at 64"):
        read_gguf_header(write_gguf(good, llama_metadata(), tensors))
