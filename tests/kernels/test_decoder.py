"""A whole decoder in one call: bit for bit what its operations give one by one."""

import pytest
import torch

from octavo_kernels import (
    embed_tokens,
    pack_dense_weight,
    pack_weight,
    quantize_weight,
    unpack_weight,
)
from octavo_kernels.cpu import threads
from octavo_kernels.decoder import MEMBER_WORD
from support.tiny_decoder import BLOCK_SIZE, HEAD_DIM, HIDDEN, make_batch, make_caches, make_decoder
from support.weights import GGUF_BLOCKS, gguf_weight


def _both(decoder, requests, dtype=torch.float32):
    """Run both ways; return their results and caches."""
    metadata, positions = make_batch(requests)
    hidden = torch.randn(len(positions), HIDDEN)
    ours, theirs = make_caches(dtype), make_caches(dtype)
    scale = HEAD_DIM**-0.5
    expected = decoder.forward_reference(hidden, positions, theirs, metadata, scale)
    result = decoder.forward(hidden.clone(), positions, ours, metadata, scale)
    return result, expected, ours, theirs


def _assert_same(result, expected, ours, theirs):
    assert result.isfinite().all()
    assert torch.equal(result, expected)
    for (k, v), (other_k, other_v) in zip(ours, theirs, strict=True):
        assert torch.equal(k, other_k)
        assert torch.equal(v, other_v)


REQUESTS = {
    "one": [(0, 1)],
    "four": [(0, 1)] * 4,
    "five": [(0, 1)] * 5,
    "prompt": [(0, 70)],
    "mixed": [(0, 1), (0, 19), (0, 3), (0, 40), (0, 1)],
}


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
def test_one_call_equals_its_operations(requests):
    _assert_same(*_both(make_decoder(), requests))


@pytest.mark.parametrize(
    "kinds",
    [
        ("q8_0",) * 5,
        ("f32",) * 5,
        ("bf16", "bf16", "q4_0", "w8a8", "f32"),
        ("q4_0", "q8_0", "bf16", "q4_0", "q8_0"),
        ("q4_0", "f32", "q4_0", "q4_0", "q4_0"),
    ],
    ids=" ".join,
)
def test_kinds_of_weights_may_be_mixed(kinds):
    for requests in (REQUESTS["one"], REQUESTS["mixed"]):
        _assert_same(*_both(make_decoder(kinds), requests))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_the_cache(dtype):
    _assert_same(*_both(make_decoder(), REQUESTS["mixed"], dtype))


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "kind"),
    [
        *[(24, 16, "f32"), (40, 16, "f32"), (32, 32, "q4_0"), (48, 16, "q4_0"), (80, 80, "q4_0")],
        # More inputs of the output projection than a dense product sums in one run.
        *[(48, 16, "f32"), (80, 80, "f32"), (80, 16, "bf16")],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_of_other_sizes(head_dim, rotary_dim, kind, dtype, monkeypatch):
    monkeypatch.setattr("support.tiny_decoder.HEAD_DIM", head_dim)
    decoder = make_decoder((kind,) * 5, rotary_dim=rotary_dim)
    _assert_same(*_both(decoder, REQUESTS["mixed"], dtype))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation):
    _assert_same(*_both(make_decoder(activation=activation), REQUESTS["mixed"]))


@pytest.mark.parametrize("kind", ["q4_0", "f32", "bf16"])
def test_biases_and_norms_of_heads(kind):
    decoder = make_decoder((kind,) * 5, bias=True, head_norms=True)
    for requests in (REQUESTS["one"], REQUESTS["mixed"]):
        _assert_same(*_both(decoder, requests))


FEATURES = {
    "windows": {"windows": (20, None)},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "norms behind": {"after_norms": True},
    "all": {
        "windows": (None, 9),
        "soft_cap": 5.0,
        "sinks": True,
        "after_norms": True,
        "head_norms": True,
        "activation": "gelu_tanh",
    },
}


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_what_other_families_add(options):
    decoder = make_decoder(**options)
    for requests in (REQUESTS["one"], REQUESTS["mixed"], REQUESTS["prompt"]):
        _assert_same(*_both(decoder, requests))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [48, 64, 70])
def test_tokens_that_a_thread_takes_through_a_layer_alone(num_tokens, num_threads, monkeypatch):
    threads.set_num_threads(num_threads)
    try:
        for most_layer_bytes in (8 << 20, 0):
            monkeypatch.setattr("octavo_kernels.decoder.MOST_LAYER_BYTES", most_layer_bytes)
            decoder = make_decoder(after_norms=True)
            _assert_same(*_both(decoder, [(0, num_tokens)]))
            alone = decoder._buffers._alone.view(torch.int64).view(num_threads, -1)
            blocks = alone[:, MEMBER_WORD + 8 :]  # what a thread was told of its last block
            assert bool(blocks.any()) == bool(most_layer_bytes)
    finally:
        threads.set_num_threads(threads.default_num_threads())


def test_what_a_fork_in_the_middle_of_a_block_left_does_not_count():
    decoder = make_decoder()
    _assert_same(*_both(decoder, [(0, 64)]))
    alone = decoder._buffers._alone.view(torch.int64).view(threads.get_num_threads(), -1)
    assert alone[:, MEMBER_WORD + 8 :].any()
    alone[:, 16] = (1 << 32) + 2  # one holds chunks, and two were taken
    alone[:, MEMBER_WORD + 4] = 1
    _assert_same(*_both(decoder, [(0, 64)]))


def test_layers_may_have_block_tables_of_their_own():
    decoder = make_decoder(windows=(None, 16))
    metadata, positions = make_batch([(0, 30), (0, 1)])
    other, _ = make_batch([(0, 30), (0, 1)])
    other.block_tables.add_(5)
    other.slot_mapping.add_(5 * BLOCK_SIZE)
    hidden = torch.randn(31, HIDDEN)
    ours, theirs = make_caches(), make_caches()
    expected = decoder.forward_reference(hidden, positions, theirs, [metadata, other], 0.25)
    result = decoder.forward(hidden.clone(), positions, ours, [metadata, other], 0.25)
    _assert_same(result, expected, ours, theirs)
    assert not torch.equal(ours[1][0][6], make_caches()[0][0][6])  # where the other table points


def test_a_token_is_the_same_in_pieces_in_every_batch_and_on_any_number_of_threads():
    decoder, scale = make_decoder(), HEAD_DIM**-0.5
    hidden = torch.randn(45, HIDDEN)
    metadata, positions = make_batch([(0, 45)])
    whole = decoder.forward(hidden.clone(), positions, make_caches(), metadata, scale)
    try:
        for num_threads in (1, 2, 3):
            threads.set_num_threads(num_threads)
            caches, start = make_caches(), 0
            for count in (1, 7, 1, 20, 16):
                metadata, positions = make_batch([(start, count)])
                piece = hidden[start : start + count].clone()
                result = decoder.forward(piece, positions, caches, metadata, scale)
                assert torch.equal(result, whole[start : start + count])
                start += count
    finally:
        threads.set_num_threads(threads.default_num_threads())
    metadata, positions = make_batch([(0, 3), (0, 45), (0, 1)])
    batch = torch.cat((torch.randn(3, HIDDEN), hidden, torch.randn(1, HIDDEN)))
    result = decoder.forward(batch, positions, make_caches(), metadata, scale)
    assert torch.equal(result[3:48], whole)


def test_what_one_call_cannot_do_is_refused():
    with pytest.raises(ValueError, match="activation is 'relu'; it must be one of silu, gelu"):
        make_decoder(activation="relu")
    with pytest.raises(ValueError, match="layers rotate 16 and 32 numbers of a head"):
        make_decoder(rotary_dim=32, windows=(None, 8))
    with pytest.raises(ValueError, match=r"rotary_dim is 8; .* must be a multiple of 16"):
        make_decoder(rotary_dim=8)


@pytest.mark.parametrize("kind", [*GGUF_BLOCKS, "w8a8", "f32", "bf16", "f16"])
def test_embeddings_are_rows_of_the_unpacked_weight(kind):
    if kind in GGUF_BLOCKS:
        weight = pack_weight(gguf_weight(kind, (43, 512))[0], kind, (43, 512))
    elif kind == "w8a8":
        weight = quantize_weight(torch.randn(43, 512), kind)
    else:
        types = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        weight = pack_dense_weight(torch.randn(43, 512).to(types[kind]))
    ids = torch.tensor([0, 42, 7, 8, 42, *range(40)])
    assert torch.equal(embed_tokens(ids, weight), unpack_weight(weight)[ids])
