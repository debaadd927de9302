"""What can be chosen for a round, and what was."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from .tree_gains import Cell

MARGIN = 1.05
"""Speculation must promise this much more than plain decoding: the estimates are no better than that."""
HOPE = 0.5
"""The part of the expected gain that does not count when it is asked whether a round can be paid for."""


@dataclass(frozen=True, slots=True)
class Option:
    """One drafter for one row: what it is expected to give. gains[d] belongs to depth d; accept[i] is a_{i+1}.

    tree: for drafters of trees what each budget brings over all requests, as `TreeGains.row` has it; None for chains.
    scale[d]: what this request gains at depth d, over what all of them do.
    """

    arm: int
    source: str
    hint: int
    pending: int
    reading: float  # seconds to read what is pending
    remaining: int  # tokens the row may still emit
    accept: list[float]
    gains: list[float]
    tree: Callable[[int], Seq[Cell]] | None = None
    scale: Seq[float] = ()

    @staticmethod
    def gains_of(accept: Seq[float]) -> list[float]:
        """Expected accepted tokens by depth."""
        return [0.0, *accumulate(accumulate(accept, mul))]

    def horizon(self) -> float:
        """Tokens over which an investment must pay: half of what may come, since answers end before their limit."""
        return max(1.0, self.remaining / 2)


@dataclass(frozen=True, slots=True)
class Choice:
    """A depth for the pass, one option or none for each row, and the expected tokens per second.

    deepest: the depth that could still be paid for if every token were rejected. For trees, nodes: candidates of a
    row; widest: as many as could be worth it in a lucky round; row_seconds: what one more node of each row takes;
    known_rate: the best of budgets that were tried.
    """

    rate: float
    depth: int
    options: Seq[Option | None]
    deepest: int = 0
    nodes: int = 0
    widest: int = 0
    row_seconds: float = 0.0
    known_rate: float = 0.0


def is_affordable(seconds: float, tokens: float, credit: float, plain: float) -> bool:
    """Whether `credit` passes can pay for a round that takes `seconds`, if half of its expected gain comes true.

    tokens: expected per row. plain: seconds of a plain round.
    """
    return seconds <= (credit + HOPE + (1 - HOPE) * tokens) * plain
