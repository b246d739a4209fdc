"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from octavo_core.wire import TokenLogprobs
from octavo_server.detokenizer import TextOffsets
from octavo_server.position_logprobs import to_position
from octavo_server.request_output import PositionLogprob, PositionLogprobs
from octavo_server.tokenizer import Tokenizer

# JSON has no minus infinity; OpenAI writes this for a token that can't be.
_LEAST_LOGPROB = -9999.0


def chat_logprobs(
    positions: list[PositionLogprobs] | None, *, as_token_ids: bool = False
) -> dict[str, Any] | None:
    """Return the ``logprobs`` of a chat choice.

    Args:
        as_token_ids: Write ``token_id:17`` in place of a token's text.
    """
    if positions is None:
        return None

    def write(entry: PositionLogprob) -> dict[str, Any]:
        return {
            "token": _by_id(entry) if as_token_ids else entry.token,
            "logprob": _finite(entry.logprob),
            "bytes": list(entry.token_bytes),
        }

    content = [
        write(position.chosen) | {"top_logprobs": [write(top) for top in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    positions: list[PositionLogprobs | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """Return ``prompt_logprobs`` in vLLM's shape: for each token a map of ids to values."""
    return [None if position is None else _by_token_id(position) for position in positions]


def _by_token_id(position: PositionLogprobs) -> dict[str, dict[str, Any]]:
    ranked = [(position.rank, position.chosen), *enumerate(position.top, start=1)]
    return {
        str(entry.token_id): {
            "logprob": _finite(entry.logprob),
            "rank": rank,
            "decoded_token": entry.token,
        }
        for rank, entry in ranked
    }


class CompletionLogprobs:
    """Writes the ``logprobs`` of one completion choice, piece by piece.

    Args:
        tokenizer: Tells where in the text a token starts.
        skip_special_tokens: The answer's text has no control tokens.
        as_token_ids: Write ``token_id:17`` in place of a token's text.
        echo: The prompt as text, if the choice begins with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        as_token_ids: bool = False,
        echo: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
        self._spell = _by_id if as_token_ids else _spell
        self._echo = echo

    def prompt(
        self, token_ids: list[int], positions: list[PositionLogprobs | None]
    ) -> dict[str, Any]:
        """Write the echoed prompt. Its first token follows nothing: its values are null.

        Args:
            token_ids: All tokens of the prompt.
            positions: One entry for each of them.
        """
        first = to_position(self._tokenizer, TokenLogprobs(token_ids[:1], [0.0], 1), 0)
        chosen = [(first if position is None else position).chosen for position in positions]
        return {
            "tokens": self._prompt_tokens(chosen),
            "token_logprobs": [
                None if position is None else _finite(position.chosen.logprob)
                for position in positions
            ],
            "top_logprobs": [
                None if position is None else self._top_by_token(position) for position in positions
            ],
            "text_offset": self._prompt_offsets(token_ids),
        }

    def answer(self, positions: list[PositionLogprobs]) -> dict[str, Any]:
        """Write the next tokens of the answer."""
        start = len(self._echo)
        return {
            "tokens": [self._spell(position.chosen) for position in positions],
            "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
            "top_logprobs": [self._top_by_token(position) for position in positions],
            "text_offset": [
                start + self._offsets.push(position.chosen.token_id) for position in positions
            ],
        }

    def _top_by_token(self, position: PositionLogprobs) -> dict[str, float]:
        """Map tokens to values. The chosen token is always there, likely or not."""
        tops: dict[str, float] = {}
        for entry in [*position.top, position.chosen]:
            # Different ids may be spelt alike: keep the likeliest.
            tops.setdefault(self._spell(entry), _finite(entry.logprob))
        return tops

    def _num_added(self, token_ids: list[int]) -> int:
        """How many control tokens stand before the text and are no part of it, such as BOS."""
        num_added = 0
        for token_id in token_ids:
            piece = self._tokenizer.piece(token_id) or ""
            if not self._tokenizer.is_special(token_id) or self._echo.startswith(piece):
                break
            num_added += 1
        return num_added

    def _prompt_offsets(self, token_ids: list[int]) -> list[int]:
        num_added = self._num_added(token_ids)
        offsets = TextOffsets(self._tokenizer, skip_special_tokens=False)
        starts = [offsets.push(token_id) for token_id in token_ids[num_added:]]
        # A tokenizer that normalizes may give back a longer text than it got.
        return [0] * num_added + [min(start, len(self._echo)) for start in starts]

    def _prompt_tokens(self, chosen: list[PositionLogprob]) -> list[str]:
        tokens = [self._spell(entry) for entry in chosen]
        first = self._num_added([entry.token_id for entry in chosen])
        # SentencePiece puts a space before a text, which is no part of it.
        if first < len(tokens) and not self._echo.startswith(tokens[first]):
            bare = tokens[first].removeprefix(" ")
            if self._echo.startswith(bare):
                tokens[first] = bare
        return tokens


class TokenCutter:
    """Cuts the text of an answer where its tokens start, whichever of them came together.

    Args:
        tokenizer: Tells where in the text a token starts.
        skip_special_tokens: The answer's text has no control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
        self._num_cut = 0  # characters
        # Tokens that start behind these.
        self._waiting: deque[tuple[int, PositionLogprobs]] = deque()

    def cut(
        self, text: str, positions: Sequence[PositionLogprobs]
    ) -> list[tuple[str, list[PositionLogprobs]]]:
        """Take the next text and tokens; the text may lag behind.

        Returns:
            At least one piece of the text, each with the tokens that start with it.
        """
        for position in positions:
            self._waiting.append((self._offsets.push(position.chosen.token_id), position))
        first = begin = self._num_cut
        self._num_cut += len(text)
        pieces: list[tuple[str, list[PositionLogprobs]]] = []
        started: list[PositionLogprobs] = []
        while self._waiting and self._waiting[0][0] < self._num_cut:
            start, position = self._waiting.popleft()
            if start > begin:
                pieces.append((text[begin - first : start - first], started))
                begin, started = start, []
            started.append(position)
        return [*pieces, (text[begin - first :], started)]


def join_logprobs(first: dict[str, Any] | None, second: dict[str, Any] | None) -> Any:
    """Join the ``logprobs`` of two pieces of one choice; either may be missing."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def _by_id(entry: PositionLogprob) -> str:
    return f"token_id:{entry.token_id}"


def _spell(entry: PositionLogprob) -> str:
    r"""Return the token as text, or, for a part of a character, as OpenAI's ``bytes:\xf0\x9f``.

    The shape has no field for the bytes, and U+FFFD would not tell one part from another.
    """
    try:
        return entry.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
