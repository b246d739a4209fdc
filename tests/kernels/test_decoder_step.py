"""A whole step in one call: what its operations give one by one, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo_kernels import (
    AttentionMetadata,
    DecoderStep,
    SamplingMetadata,
    embed_tokens,
    quantized_matmul,
    sample,
)
from octavo_kernels.cpu import threads
from support.tiny_decoder import (
    BLOCK_SIZE,
    HEAD_DIM,
    HIDDEN,
    NUM_BLOCKS,
    make_caches,
    make_decoder,
    make_weight,
)

VOCAB, SLOTS = 333, 8
SCALE = HEAD_DIM**-0.5


class Batch(SimpleNamespace):
    """Slots with prompts of some lengths, and blocks for 16 tokens more; a slot for each."""

    def __init__(self, lengths, seed=0):
        random = np.random.default_rng(seed)
        super().__init__(
            token_ids=random.integers(0, VOCAB, (SLOTS, 350)).astype(np.int32),
            num_tokens=np.zeros(SLOTS, np.int64),
            block_tables=[np.full((SLOTS, 50), -1, np.int32) for _ in range(2)],
            num_blocks=np.zeros(SLOTS, np.int64),
            temperature=np.array([0, 0.8, 0, 1.3, 0.5, 0, 2, 1], np.float32),
            top_k=np.array([0, 5, 0, 0, 1000, 0, 40, 3], np.int32),
            top_p=np.array([1, 1, 1, 0.9, 0.8, 1, 1, 0.5], np.float32),
            min_p=np.array([0, 0, 0, 0, 0.1, 0, 0.02, 0], np.float32),
            seeds=random.integers(-(2**62), 2**62, SLOTS),
        )
        with np.errstate(divide="ignore"):
            self.log_min_p = np.log(self.min_p.astype(np.float64)).astype(np.float32)
        blocks = iter(random.permutation(np.arange(1, NUM_BLOCKS)).tolist())
        for slot, length in lengths.items():
            self.num_tokens[slot] = length
            self.num_blocks[slot] = -(-(length + 16) // BLOCK_SIZE)
            for i in range(self.num_blocks[slot]):
                self.block_tables[0][slot, i] = block = next(blocks)
                self.block_tables[1][slot, i] = NUM_BLOCKS - block


class Twin:
    """The same steps with one public function after the other."""

    def __init__(self, decoder, embedding, head, batch, caches, groups, scale):
        self.groups, self.scale = groups, scale
        self.decoder, self.embedding, self.head = decoder, embedding, head
        self.batch, self.caches = batch, caches

    def logits(self, slots, counts, starts):
        batch = self.batch
        positions = [torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]
        ends = [s + c for s, c in zip(starts, counts, strict=True)]
        first = np.concatenate(([0], np.cumsum(counts)))

        def metadata(group):
            table = torch.from_numpy(batch.block_tables[group][slots])
            mapping = [
                table[row, where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
                for row, where in enumerate(positions)
            ]
            return AttentionMetadata(
                query_start_loc=torch.tensor(first, dtype=torch.int32),
                seq_lens=torch.tensor(ends, dtype=torch.int32),
                block_tables=table,
                slot_mapping=torch.cat(mapping),
                host_query_start_loc=first.tolist(),
                host_seq_lens=ends,
                block_size=BLOCK_SIZE,
            )

        ids = torch.cat(
            [
                torch.from_numpy(batch.token_ids[slot])[where]
                for slot, where in zip(slots, positions, strict=True)
            ]
        )
        hidden = self.decoder.forward_reference(
            embed_tokens(ids, self.embedding) * torch.tensor(self.scale),
            torch.cat(positions),
            self.caches,
            [metadata(group) for group in self.groups],
            SCALE,
        )
        rows = [i for i, slot in enumerate(slots) if ends[i] == batch.num_tokens[slot]]
        return rows, quantized_matmul(hidden[[first[i + 1] - 1 for i in rows]], self.head)

    def sample(self, slots, counts, starts):
        batch = self.batch
        rows, logits = self.logits(slots, counts, starts)
        sampled = [-1] * len(slots)
        if not rows:
            return sampled
        of_rows = np.array(slots)[rows]
        parameters = [
            getattr(batch, name)[of_rows]
            for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "num_tokens")
        ]
        tokens = sample(logits, SamplingMetadata(*parameters)).tolist()
        for i, slot, token in zip(rows, of_rows, tokens, strict=True):
            sampled[i] = token
            batch.token_ids[slot, batch.num_tokens[slot]] = token
            batch.num_tokens[slot] += 1
        return sampled


def _pair(
    lengths,
    kinds=("q4_0",) * 5,
    cache=torch.float32,
    tables=("q8_0", "q4_0"),
    groups=(0, 0),
    scale=1.0,
    **options,
):
    decoder = make_decoder(kinds, **options)
    embedding, head = (make_weight(kind, VOCAB, HIDDEN) for kind in tables)
    ours, theirs = Batch(lengths), Batch(lengths)
    caches, other_caches = make_caches(cache), make_caches(cache)
    step = DecoderStep(
        *(decoder, embedding, head, ours, caches, SCALE),
        group_of_layer=groups,
        embedding_scale=scale,
    )
    twin = Twin(decoder, embedding, head, theirs, other_caches, groups, scale)

    def same():
        known = ours.num_tokens
        assert np.array_equal(known, theirs.num_tokens)
        assert all(
            np.array_equal(
                ours.token_ids[slot, : known[slot]], theirs.token_ids[slot, : known[slot]]
            )
            for slot in lengths
        )
        for pair, other_pair in zip(caches, other_caches, strict=True):
            for mine, other in zip(pair, other_pair, strict=True):
                assert torch.equal(mine, other)

    return step, twin, same


@pytest.mark.parametrize("cache", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_prompts_in_pieces_and_decodes_are_those_of_the_operations(num_threads, cache):
    try:
        threads.set_num_threads(num_threads)
        step, twin, same = _pair({5: 40, 1: 3, 6: 70, 0: 1, 3: 9, 4: 2}, cache=cache)
        steps = [
            ([6, 1], [30, 3], [0, 0]),
            ([1, 6, 5, 0], [1, 40, 7, 1], [3, 30, 0, 0]),
            ([0, 5], [1, 20], [1, 7]),
            ([5, 3, 4, 6], [13, 9, 2, 1], [27, 0, 0, 70]),
            ([0, 1, 3, 4, 5, 6], [1] * 6, [2, 4, 9, 2, 40, 71]),
            ([6, 4], [1, 1], [72, 3]),
            ([3], [1], [10]),
        ]
        for arguments in steps:
            assert step.sample(*arguments) == twin.sample(*arguments)
            same()
    finally:
        threads.set_num_threads(threads.default_num_threads())


def test_a_long_context_is_divided_as_ever():
    step, twin, same = _pair({0: 1, 1: 270})
    for arguments in [([1], [269], [0]), ([1], [1], [269]), ([0, 1], [1, 1], [0, 270])]:
        assert step.sample(*arguments) == twin.sample(*arguments)
        same()


def test_slots_that_share_a_prefix_are_as_ever():
    shared, slots = 72, [7, 2, 5]
    step, twin, same = _pair({7: 80, 2: 90, 5: 75})
    for batch in (step._tables, twin.batch):
        for slot in slots[1:]:
            batch.token_ids[slot, :shared] = batch.token_ids[slots[0], :shared]
            for table in batch.block_tables:
                blocks = shared // BLOCK_SIZE
                table[slot, :blocks] = table[slots[0], :blocks]
    for arguments in [
        ([7], [80], [0]),
        ([2, 5], [18, 3], [shared, shared]),
        ([7, 2, 5], [1] * 3, [80, 90, 75]),
        ([5, 7], [1] * 2, [76, 81]),
    ]:
        assert step.sample(*arguments) == twin.sample(*arguments)
        same()


def test_kinds_of_weights_may_be_mixed():
    kinds = ("bf16", "q4_0", "f32", "w8a8", "q8_0")
    step, twin, same = _pair({2: 5, 7: 20}, kinds, tables=("f32", "bf16"), head_norms=True)
    for arguments in [([2, 7], [5, 20], [0, 0]), ([7, 2], [1, 1], [20, 5])]:
        assert step.sample(*arguments) == twin.sample(*arguments)
        same()


def test_windows_with_tables_of_their_own_and_what_else_other_families_add():
    step, twin, same = _pair(
        {0: 1, 1: 40, 4: 90},
        groups=(1, 0),
        windows=(12, None),
        scale=9.8,
        soft_cap=3.0,
        sinks=True,
        after_norms=True,
    )
    for arguments in [
        ([4, 1], [64, 40], [0, 0]),
        ([0, 4, 1], [1, 26, 1], [0, 64, 40]),
        ([1, 4, 0], [1, 1, 1], [41, 90, 1]),
    ]:
        assert step.sample(*arguments) == twin.sample(*arguments)
        same()


def test_logits_with_a_bound_are_not_sampled_in_the_call():
    decoder, batch = make_decoder(), Batch({3: 2})
    weights = [make_weight("q4_0", VOCAB, HIDDEN)] * 2
    plain, bounded = (
        DecoderStep(decoder, *weights, batch, make_caches(), SCALE, logits_soft_cap=cap)
        for cap in (None, 1.5)
    )
    assert (plain.samples, bounded.samples) == (True, False)
    _, logits = plain.compute_logits([3], [2], [0])
    _, within = bounded.compute_logits([3], [2], [0])
    assert torch.equal(within, torch.tanh(logits / 1.5) * 1.5)


def test_logits_are_left_to_the_caller_who_appends():
    step, twin, same = _pair({2: 5, 7: 20, 1: 4})
    arguments = ([1, 2, 7], [3, 5, 20], [0, 0, 0])
    rows, logits = step.compute_logits(*arguments)
    expected_rows, expected = twin.logits(*arguments)
    assert rows.tolist() == expected_rows == [1, 2]
    assert torch.equal(logits, expected)
    same()  # nothing was appended
    assert step.compute_logits([7], [2], [3])[0].tolist() == []


def test_a_table_that_was_replaced_is_read_where_it_is_now():
    step, twin, same = _pair({2: 5})
    assert step.sample([2], [5], [0]) == twin.sample([2], [5], [0])
    tables = step._tables
    tables.token_ids = np.concatenate((tables.token_ids, tables.token_ids), axis=1)
    tables.block_tables[0] = np.concatenate((tables.block_tables[0],) * 2, axis=1)
    assert step.sample([2], [1], [5]) == twin.sample([2], [1], [5])
    same()


def test_a_token_or_block_that_is_not_there_is_refused_and_nothing_is_done():
    step, _, same = _pair({2: 5, 3: 9})
    with pytest.raises(RuntimeError, match=r"slot 3 .* up to token 10, but has 9 tokens"):
        step.sample([2, 3], [5, 10], [0, 0])
    step._tables.num_blocks[2] = 0
    with pytest.raises(RuntimeError, match="up to token 5, but has 5 tokens and blocks for 0"):
        step.sample([2], [5], [0])
    same()


def test_weights_that_it_cannot_use_are_refused():
    batch = Batch({0: 1})
    weights = [make_weight("q4_0", VOCAB, HIDDEN)] * 2
    with pytest.raises(ValueError, match="1 KV caches for 2 layers"):
        DecoderStep(make_decoder(), *weights, batch, make_caches()[:1], SCALE)
