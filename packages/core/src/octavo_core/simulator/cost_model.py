"""How long a step takes on a device.

    seconds = step_seconds
            + linear(tokens)                  piecewise linear, flat while weights are read
            + row_seconds × rows
            + sample_seconds × sampled rows   the output layer and the sampler
            + context_seconds × keys          K and V that attention reads, once a row
            + pair_seconds × pairs            (query, key) products of prompts
            + swap_seconds × blocks           copied from or to the host tier

Every term is linear in its coefficient and none is negative, so the same form serves a
roofline estimate (Williams, Waterman and Patterson, 2009) and a fit to measured steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo_core.errors import ConfigError
from octavo_core.scheduler_output import SchedulerOutput


class StepLoad(NamedTuple):
    """What a step computes, as far as its time depends on it.

    Attributes:
        num_tokens: Tokens through the layers.
        num_rows: Requests in the batch.
        num_sampled: Requests that get a token.
        num_context_tokens: Keys that attention reads, each once for each row.
        num_attention_pairs: (query, key) pairs of rows with more than one token.
        num_swapped_blocks: Blocks copied between the device and the host tier.
    """

    num_tokens: int
    num_rows: int
    num_sampled: int
    num_context_tokens: int
    num_attention_pairs: int
    num_swapped_blocks: int = 0


def step_load(step: SchedulerOutput, num_sampled: int) -> StepLoad:
    """Describe a step. `num_sampled` is what only a worker knows."""
    counts, starts = step.num_scheduled_tokens, step.num_computed_tokens
    num_tokens = sum(counts)
    num_pairs = 0
    if num_tokens > len(counts):  # else a pure decode step, the most frequent one
        for count, start in zip(counts, starts, strict=True):
            if count > 1:
                num_pairs += count * start + count * (count + 1) // 2
    num_swapped = len(step.blocks_to_swap_out) + len(step.blocks_to_swap_in)
    num_context = sum(starts) + num_tokens
    return StepLoad(num_tokens, len(counts), num_sampled, num_context, num_pairs, num_swapped)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step; see the module's formula.

    Attributes:
        step_seconds: Of every step: host, launches, reading the weights.
        token_knots: Where the cost of one more token changes; the first is 0.
        token_seconds: For each knot, seconds of a token from there to the next knot.
        row_seconds: Of each request in the batch.
        sample_seconds: Of each token sampled.
        context_seconds: Of each key and value read.
        pair_seconds: Of each (query, key) pair of a prompt.
        swap_seconds: Of each block swapped out or in; a calibration does not measure it.
        source: Where the figures come from, for a person.
        median_error: Of a fit: half of the measured steps are off by less than this share.
    """

    step_seconds: float
    token_knots: tuple[int, ...] = (0,)
    token_seconds: tuple[float, ...] = (0.0,)
    row_seconds: float = 0.0
    sample_seconds: float = 0.0
    context_seconds: float = 0.0
    pair_seconds: float = 0.0
    swap_seconds: float = 0.0
    source: str = ""
    median_error: float | None = None

    def __post_init__(self) -> None:
        if len(self.token_knots) != len(self.token_seconds) or not self.token_knots:
            raise ConfigError(
                f"token_knots has {len(self.token_knots)} and token_seconds "
                f"{len(self.token_seconds)} numbers; a cost model needs equally many.",
                field="token_knots",
            )
        if self.token_knots[0] != 0 or list(self.token_knots) != sorted(set(self.token_knots)):
            raise ConfigError(
                f"token_knots is {list(self.token_knots)}; it must start with 0 and grow.",
                field="token_knots",
            )
        named = list(zip(_COEFFICIENTS, self.coefficients(), strict=True))
        named += [("token_seconds", value) for value in self.token_seconds]
        for name, value in named:
            if not 0 <= value <= _MAX_SECONDS:
                raise ConfigError(
                    f"{name} is {value:g}; it must be at least 0 and at most {_MAX_SECONDS:g}.",
                    field=name,
                )
        if self.seconds(StepLoad(1, 1, 1, 1, 0)) <= 0:
            raise ConfigError(
                "the cost model makes a step of one token take no time.", field="step_seconds"
            )

    def coefficients(self) -> tuple[float, ...]:
        """Return the coefficients outside the piecewise term, in the order of the formula."""
        return (
            self.step_seconds,
            self.row_seconds,
            self.sample_seconds,
            self.context_seconds,
            self.pair_seconds,
            self.swap_seconds,
        )

    def seconds(self, load: StepLoad) -> float:
        """Return how long a step takes."""
        tokens, rows, sampled, context, pairs, swapped = load
        total = (
            self.step_seconds
            + self.row_seconds * rows
            + self.sample_seconds * sampled
            + self.context_seconds * context
            + self.pair_seconds * pairs
            + self.swap_seconds * swapped
        )
        knots, slopes = self.token_knots, self.token_seconds
        for index in range(len(knots) - 1, -1, -1):
            if tokens > knots[index]:
                total += slopes[index] * (tokens - knots[index])
                tokens = knots[index]
        return total


_COEFFICIENTS = (
    "step_seconds",
    "row_seconds",
    "sample_seconds",
    "context_seconds",
    "pair_seconds",
    "swap_seconds",
)
# 11 days; sums of many more would leave the range of a clock.
_MAX_SECONDS = 1e6


def read_cost_model(path: str | Path) -> CostModel:
    """Read a cost model from its JSON file.

    Raises:
        ConfigError: The file is missing, or holds no cost model.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigError(
            f"cost model {path} can't be read: {error.strerror}.", field="cost_model"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cost model {path}: {str(error).rstrip('.')}.", field="cost_model"
        ) from error


def write_cost_model(path: str | Path, model: CostModel) -> None:
    """Write a cost model as a JSON file.

    Raises:
        ConfigError: The file can't be written.
    """
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    except OSError as error:
        raise ConfigError(
            f"cost model {path} can't be written: {error.strerror}.", field="output"
        ) from error
