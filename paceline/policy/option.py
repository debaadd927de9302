"""What can be chosen for a round, and what was.

Drafters with masks (SPACE) are planned as trees, chains too, since their rows grow in two ways:

    depth d, n candidates    1 + n groups of 1 + min(d, m) rows: a node and the masks below it
    restart                  1 group: where no masks hang, they are hung first, and the next round drafts from them
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from .lengths import Ends
from .tree_gains import Cell

MARGIN = 1.05
"""Speculation must promise this much more than plain decoding: the estimates are no better than that."""
HOPE = 0.5
"""The part of the expected gain that does not count when it is asked whether a round can be paid for."""
DRAFTING = 8 / 9
"""The part of a drafter's rounds with masks that draft; the others are restarts, where none hang, and only hang them.

A restart earns nothing by itself, so it is rated as the cycle that it begins: one restart, then eight rounds that draft
until a plain round or another drafter loses the masks. Tokens and seconds are those of the mean round of the cycle.
"""
LOST = 0.5
"""Plain rounds that it costs to lose masks: the one that hangs new ones gives a token and not two."""


@dataclass(frozen=True, slots=True)
class Option:
    """One drafter for one row: what it is expected to give. gains[d] belongs to depth d; accept[i] is a_{i+1}.

    tree: for drafters of trees what each budget brings over all requests, as `TreeGains.row` has it; None for chains.
    scale[d]: what this request gains at depth d, over what all of them do. masks, ready: see `DraftOptions`.
    """

    drafter_index: int
    source: str
    hint: int
    uncached_tokens: int
    reading: float  # seconds to read what is pending
    emitted: int  # tokens of the answer so far
    ends: Ends  # where it may end
    horizon: float  # tokens that are expected still: over these an investment must pay
    accept: list[float]
    gains: list[float]
    tree: Callable[[int], Seq[Cell]] | None = None
    scale: Seq[float] = ()
    masks: int = 0
    ready: int = 1 << 30

    @property
    def restarts(self) -> bool:
        """Whether this round could only hang masks, for the next one to draft from."""
        return self.masks > 0 and self.ready == 0

    @staticmethod
    def gains_of(accept: Seq[float]) -> list[float]:
        """Expected accepted tokens by depth."""
        return [0.0, *accumulate(accumulate(accept, mul))]


@dataclass(frozen=True, slots=True)
class Choice:
    """A depth for the pass, one option or none for each row, and the expected tokens per second.

    deepest: the depth that could still be paid for if every token were rejected. For trees, nodes: candidates of a
    row; widest: as many as could be worth it in a lucky round; row_seconds: what one more node of each row takes;
    known_rate: the best of budgets that were tried. tokens: expected of all rows.
    """

    rate: float
    depth: int
    options: Seq[Option | None]
    deepest: int = 0
    nodes: int = 0
    widest: int = 0
    row_seconds: float = 0.0
    known_rate: float = 0.0
    tokens: float = 0.0

    def worth(self, rows: Seq[Seq[Option]], plain: float) -> float:
        """The rate, less what it costs that rows with masks to draft from are drafted for by others.

        rows: all options of each row. plain: seconds of a plain round.
        """
        lost = sum(
            any(o.masks and o.ready for o in row) and not (mine and mine.masks)
            for row, mine in zip(rows, self.options, strict=True)
        )
        if not lost or not self.tokens:
            return self.rate
        return self.tokens / (self.tokens / self.rate + LOST * plain * lost / len(rows))


def width(depth: int, nodes: int, masks: int) -> int:
    """Rows of a pass behind the root's: `nodes` candidates, and the masks below the root and below each of them.

    A pass with masks takes as many rows as one over this many candidates without; 0 masks: the candidates alone.
    """
    return (1 + nodes) * (1 + min(depth, masks)) - 1


def is_affordable(seconds: float, tokens: float, credit: float, plain: float) -> bool:
    """Whether `credit` passes can pay for a round that takes `seconds`, if half of its expected gain comes true.

    tokens: expected per row. plain: seconds of a plain round.
    """
    return seconds <= (credit + HOPE + (1 - HOPE) * tokens) * plain
