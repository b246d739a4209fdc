"""Pairs of texts to be scored: together by a cross-encoder, or by their embeddings' angle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo_core.pooling_params import PooledOutput
from octavo_core.wire import EngineCoreRequest
from octavo_server.pooled_output import cosine, to_numbers
from octavo_server.pooling_input_processor import PoolingInputProcessor, PoolingOptions


@dataclass(frozen=True)
class ScoredPairs:
    """What the engine has to compute for pairs, and how their scores come of it.

    Attributes:
        requests: One for each pair, or one for each text.
        sides: For each pair the places of its two texts among the requests; None where a
            request is a pair.
    """

    requests: list[EngineCoreRequest]
    sides: list[tuple[int, int]] | None

    def scores(self, outputs: Sequence[PooledOutput]) -> list[float]:
        """Return the pairs' scores.

        Raises:
            RequestFailedError: A number is NaN or infinite.
        """
        numbers = [to_numbers(output) for output in outputs]
        if self.sides is None:
            return [scores[0] for scores in numbers]
        return [cosine(numbers[first], numbers[second]) for first, second in self.sides]

    def token_ids(self, index: int) -> list[int]:
        """Return the tokens of a pair, or of its two texts behind each other."""
        places = (index,) if self.sides is None else self.sides[index]
        return [token for place in places for token in self.requests[place].prompt_token_ids]


def prepare_pairs(
    processor: PoolingInputProcessor,
    request_id: str,
    first: str | Sequence[str],
    second: str | Sequence[str],
    options: PoolingOptions,
    fields: tuple[str, str],
) -> ScoredPairs:
    """Check and tokenize pairs.

    Args:
        processor: Of the model.
        request_id: Of the API request.
        first: One text, or as many as there are in `second`.
        second: One text or several.
        options: What the caller says about them.
        fields: What errors call the two.

    Raises:
        InvalidRequestError: A text or an option can't be used.
    """
    is_cross_encoder = processor.pooler.is_classifier
    options = options.replace(task="classify" if is_cross_encoder else "embed")
    processor.check_options(options)
    named_1, named_2 = _named(fields[0], first), _named(fields[1], second)
    count = len(named_1)
    if is_cross_encoder:
        pairs = [
            _prepare_pair(processor, f"{request_id}-{i}", named_1[i % count], named, options)
            for i, named in enumerate(named_2)
        ]
        return ScoredPairs(pairs, None)
    requests = [
        processor.process_text(f"{request_id}-{number}", text, options, name)
        for number, (name, text) in enumerate(named_1 + named_2)
    ]
    return ScoredPairs(requests, [(i % count, count + i) for i in range(len(named_2))])


def _prepare_pair(
    processor: PoolingInputProcessor,
    request_id: str,
    first: tuple[str, str],
    second: tuple[str, str],
    options: PoolingOptions,
) -> EngineCoreRequest:
    names, texts = zip(first, second, strict=True)
    return processor.process_pair(request_id, *texts, options, fields=names)


def _named(field: str, texts: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return texts with what errors call them."""
    if isinstance(texts, str):
        return [(field, texts)]
    return [(f"{field}[{number}]", text) for number, text in enumerate(texts)]
