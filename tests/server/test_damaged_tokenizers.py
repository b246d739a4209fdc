"""Two hundred damaged tokenizer.json files: each is refused by name, or works."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo_core.errors import ModelError
from octavo_server.tokenizer import MAX_TOKEN_ID, load_tokenizer
from support.prompts import PROMPTS

NUM_MUTANTS = 200  # of each kind

TEXTS = (*PROMPTS[:2], *PROMPTS[8:10], PROMPTS[13], "<s>spelt out</s> [CLS] x", "")
VALUES = (None, True, 0, -1, 2**31, 2**64, 1.5, "", "x", [], {}, [1], {"a": 1})


def _bpe() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(PROMPTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def _unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(PROMPTS, trainer)
    return backend


def _word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(PROMPTS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


# Each changes a file, and is given a source of chance.


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(rng: random.Random, data: bytes) -> bytes:
    index = rng.randrange(len(data))
    return data[:index] + bytes([data[index] ^ 1 << rng.randrange(8)]) + data[index + 1 :]


def _places(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else ()
    if isinstance(node, list):
        children = enumerate(node)
    for key, child in children:
        yield (*place, key)
        yield from _places(child, (*place, key))


def _parent_and_key(rng: random.Random, state: Any) -> tuple[Any, Any]:
    """Choose a place, more often one of the structure than one of the vocabulary."""
    places = list(_places(state))
    if rng.random() < 0.7:
        places = [place for place in places if len(place) <= 3 and place[:2] != ("model", "vocab")]
    *above, key = rng.choice(places)
    for name in above:
        state = state[name]
    return state, key


def _leave_out(rng: random.Random, data: bytes) -> bytes:
    state = json.loads(data)
    parent, key = _parent_and_key(rng, state)
    del parent[key]
    return json.dumps(state).encode()


def _wrong_type(rng: random.Random, data: bytes) -> bytes:
    state = json.loads(data)
    parent, key = _parent_and_key(rng, state)
    parent[key] = rng.choice(VALUES)
    return json.dumps(state).encode()


def _wrong_id(rng: random.Random, data: bytes) -> bytes:
    state = json.loads(data)
    wrong = rng.choice([0, 7, 5000, 10**6, 10**9, 2**31, 2**32 - 1])
    vocabulary = state["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary[rng.choice(list(vocabulary))] = wrong
    if state["added_tokens"] and rng.random() < 0.5:
        rng.choice(state["added_tokens"])["id"] = wrong
    return json.dumps(state).encode()


MUTATIONS = (_cut, _flip, _leave_out, _wrong_type, _wrong_id)


def _load(folder: Path, data: bytes) -> Any:
    (folder / "tokenizer.json").write_bytes(data)
    return load_tokenizer(folder)


def _use(tokenizer: Any) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.encode_plain(text)
        tokenizer.encode_pair(text, text)
        assert len(tokenizer.spans(text)) <= len(ids)
        assert isinstance(tokenizer.decode(ids), str)
        for token_id in ids:
            tokenizer.token_bytes(token_id)
    # Ids beyond the vocabulary, and those of embeddings that have more rows.
    for token_id in (0, tokenizer.vocab_size - 1, tokenizer.vocab_size, 2**31 - 1):
        tokenizer.decode([token_id])
        tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("make", [_bpe, _unigram, _word_piece])
def test_each_is_refused_by_name_or_works(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    data = make().to_str().encode()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    _use(_load(tmp_path, data))
    num_refused = 0
    for seed in range(NUM_MUTANTS):
        rng = random.Random(seed)
        mutant = MUTATIONS[seed % len(MUTATIONS)](rng, data)
        refusal, tokenizer = None, None
        try:
            tokenizer = _load(tmp_path, mutant)
        except ModelError as error:
            refusal = error
        if refusal is None:
            _use(tokenizer)
            continue
        assert refusal.field == "tokenizer.json"
        assert str(tmp_path / "tokenizer.json") in str(refusal)
        num_refused += 1
    assert NUM_MUTANTS // 2 < num_refused < NUM_MUTANTS


def test_what_is_found_by_using_it_once(tmp_path: Path) -> None:
    state = json.loads(_bpe().to_str())
    vocabulary = state["model"]["vocab"]

    def refused(message: str, **model: Any) -> None:
        changed = {**state, "model": {**state["model"], **model}}
        with pytest.raises(ModelError, match=message):
            _load(tmp_path, json.dumps(changed).encode())

    refused("1 of its tokens have the id of another one", vocab={**vocabulary, "a": 9})
    # Writing such a tokenizer down took half a minute, at the first text with a control token.
    refused(
        f"the id 4294967295; the largest is {MAX_TOKEN_ID}", vocab={**vocabulary, "a": 2**32 - 1}
    )
    state["post_processor"]["special_tokens"] = {}  # a panic of the library
    refused("tokenizer.json is no tokenizer")
