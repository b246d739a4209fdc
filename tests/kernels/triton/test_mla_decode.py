"""Latent attention in Triton against a softmax written out in float64."""

import pytest
import torch

from octavo_kernels.triton import mla_decode, tiles
from support.paged_batch import CASES, make_batch, reference

RANK, ROPE = 32, 16


@pytest.fixture(autouse=True)
def few_segments(monkeypatch):
    monkeypatch.setattr(tiles, "NUM_SEGMENTS", 2)


def attend(lens, heads, dtype=torch.float32, rank=RANK, rope=ROPE, kind=None):
    dims = (rank + rope, rank)
    query, keys, _, metadata = make_batch(lens, heads=(heads, 1), dims=dims, dtype=dtype)
    latents = (keys if kind is None else keys.to(kind))[:, 0]
    result = mla_decode(query, latents, metadata, 0.2, rank)
    assert result.dtype == dtype
    stored = latents.float().unsqueeze(1)
    return result.double(), reference(query, stored, stored[..., :rank], metadata, 0.2)


LENS = [[(1, 9), (5, 5), (2, 70)], CASES["decode"], CASES["rows without tokens"], CASES["nothing"]]


@pytest.mark.parametrize("lens", LENS, ids=["mixed", "decode", "rows without tokens", "nothing"])
def test_matches_the_written_out_softmax(lens):
    result, expected = attend(lens, 4)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("heads", [1, 16, 17])
@pytest.mark.parametrize(("rank", "rope"), [(48, 8), (16, 16)])
def test_heads_and_sizes(heads, rank, rope):
    result, expected = attend([(1, 20), (2, 40)], heads, rank=rank, rope=rope)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_types(kind, native, monkeypatch):
    monkeypatch.setattr(tiles, "has_fp8_e4m3", lambda: native)
    result, expected = attend([(1, 20), (2, 40)], 3, torch.bfloat16, kind=kind)
    torch.testing.assert_close(result, expected, rtol=1.6e-2, atol=1.6e-2)
