"""The numbers of a benchmark, from plain data: speed-ups with intervals, and acceptance by position.

The unit of every interval is the prompt: all its turns and repeats are summed before anything is resampled, because
they are not independent of each other.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cost:
    """What one prompt took on one side: tokens emitted and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Speed of this prompt; 0 where nothing was timed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% percentile-bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Speedup:
    """How much faster one side is than another, over the same prompts.

    weighted: ratio of pooled speeds, sum of tokens over sum of seconds, in which a long answer counts for more.
    prompt_mean: mean over prompts of each prompt's own ratio.
    """

    weighted: Estimate
    prompt_mean: Estimate


@dataclass(frozen=True)
class Position:
    """How often the i-th drafted token of a round stood, i from 1.

    rounds: those that drafted at least i tokens in a row. unconditional: share of them that accepted at least i.
    conditional: share that accepted at least i of those that drafted i and accepted the i - 1 before it; None where
    no round came so far.
    """

    position: int
    rounds: int
    unconditional: float
    conditional: float | None


def pooled(costs: Seq[Cost]) -> float | None:
    """Tokens per second over all prompts together; None where nothing was timed."""
    return Cost(sum(cost.tokens for cost in costs), sum(cost.seconds for cost in costs)).tokens_per_s or None


def speedup(base: Seq[Cost], other: Seq[Cost], seed: int = 0, resamples: int = RESAMPLES) -> Speedup | None:
    """Compare `other` with `base`, prompt i of the one with prompt i of the other; None without prompts.

    Prompts are resampled with replacement in pairs, so that a hard prompt is hard on both sides.
    """
    if not base or len(base) != len(other):
        return None
    columns = [(b.tokens, b.seconds, o.tokens, o.seconds) for b, o in zip(base, other, strict=True)]
    data = np.asarray(columns, dtype=np.float64)  # [prompts, 4]
    draws = np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))
    sums = data[draws].sum(axis=1)  # [resamples, 4]
    ratios = _ratios(data)
    return Speedup(
        _estimate(float(_ratios(data.sum(axis=0, keepdims=True))[0]), _ratios(sums)),
        _estimate(float(ratios.mean()), ratios[draws].mean(axis=1)),
    )


def acceptance_by_position(rounds: Seq[tuple[int, int]]) -> list[Position]:
    """Acceptance of the 1st, 2nd, ... drafted token, from (length of the longest drafted path, tokens accepted).

    (3, 1), (3, 3), (1, 1), (0, 0) give: position 1: 3 rounds, 3/3; position 2: 2 rounds, 1/2, and 1/2 given the first;
    position 3: 2 rounds, 1/2, and 1/1 given the second.
    """
    found = []
    for i in range(1, max((drafted for drafted, _ in rounds), default=0) + 1):
        reached = [accepted for drafted, accepted in rounds if drafted >= i]
        stood = sum(accepted >= i for accepted in reached)
        tested = sum(accepted >= i - 1 for accepted in reached)
        found.append(Position(i, len(reached), stood / len(reached), stood / tested if tested else None))
    return found


def _ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Speed of the other side over that of the base, for rows of (tokens, seconds, tokens, seconds)."""
    least = np.finfo(np.float64).tiny
    seconds = np.maximum(sums[:, [1, 3]], least)
    return (sums[:, 2] / seconds[:, 1]) / np.maximum(sums[:, 0] / seconds[:, 0], least)


def _estimate(value: float, resampled: NDArray[np.float64]) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
