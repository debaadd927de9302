"""What a tree of any size would have brought, learnt by replaying each round with smaller budgets.

Ranked by the product of the drafter's confidences along their paths (a tie goes to the shallower), the best n nodes of
a tree are closed under parents, and they are what the drafter would have kept with a budget of n. So one round tells
exactly what every smaller depth and number of nodes would have given:

    root ─ a .6 ─ aa .5        rank  1 a   2 aa  3 b   4 ab  5 ba      accepted: b, ba
         │      └ ab .2              .60   .30   .25   .12   .08
         └ b .25 ─ ba .3       n = 2: nothing      n = 3, 4: b      n = 5: b, ba      depth 1, n = 2: b

Whether a node stands is known of every node, visited or not: what hangs under a rejected node is not what the target
says. (It is the *conditional* chance of a node, given its parent, that only visited nodes tell; see `acceptance`.)
Of larger trees than were drafted nothing is known but a guess: PRIOR's growth, in proportion to what smaller ones gave.
"""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from typing import final

from ..core.outputs import Round
from .acceptance import HALF_LIFE, PRIOR, WEIGHT
from .profile import TREE_CELLS

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""With the root they fill the steps of passes that are padded to 2, 4, 8 or 16 rows."""
assert len(DEPTHS) * len(NODES) == TREE_CELLS

Cell = tuple[float, float, float, float]
"""Of a budget: expected accepted tokens, nodes kept and levels drafted, and the rounds that told so."""

FRESH, EVERY = 32, 4
"""After the first rounds the rows are worked out anew every few rounds only: planning has to be quick."""
_FADE = 0.5 ** (1 / HALF_LIFE)


def _prior(depth: int, nodes: int) -> float:
    """Accepted tokens of a tree nobody has seen yet: one of w siblings stands with 1 - (1 - PRIOR) / sqrt(w)."""
    stands = 1 - (1 - PRIOR) * (depth / nodes) ** 0.5
    return sum(stands**i for i in range(1, depth + 1))


FIRST = [next(g for g, n in enumerate(NODES) if n >= depth) for depth in DEPTHS]
"""For each depth the place of the smallest number of nodes that can reach it."""
_GUESS = [[_prior(d, n) if n >= d else 0.0 for n in NODES] for d in DEPTHS]


def path_products(record: Round) -> list[float]:
    """The product of confidences along the path to each node, root first (1.0); all 1.0 where there are none."""
    products = [1.0]
    if not record.confidences:
        return products * len(record.parents)
    for parent, confidence in zip(record.parents[1:], record.confidences, strict=True):
        products.append(products[parent] * confidence)
    return products


def depths_of(record: Round) -> list[int]:
    """Edges between the root and each node."""
    depths = [0]
    for parent in record.parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


@final
class TreeGains:
    """Accepted tokens, kept nodes and depth reached by budget (depth, nodes), fading, of one drafter.

    Sums count in units that grow as old rounds fade, so that fading takes no work.
    """

    def __init__(self, sums: Seq[Seq[float]] = ()):
        given = [list(column) for column in sums]
        given = given or [[0.0] * TREE_CELLS for _ in range(4)]
        self._tries, self._gain, self._kept, self._levels = given
        self._unit, self._seen = 1.0, 0
        self._rows: list[list[Cell]] = []

    def observe(self, record: Round, products: Seq[float], depth: int, nodes: int, drafted: int) -> None:
        """A round with this budget, which took `drafted` levels; products: of `path_products`."""
        self._seen += 1
        if self._seen < FRESH or self._seen % EVERY == 0:
            self._rows = []
        self._unit /= _FADE
        if self._unit > 1e9:
            self._rescale()
        unit, width, depths = self._unit, len(NODES), depths_of(record)
        order = sorted(range(1, len(products)), key=lambda node: (-products[node], depths[node], node))
        walk = set(record.path)
        ranks, count, done = list[int](), 0, -1
        for place, most in enumerate(DEPTHS):
            if most > depth:
                break
            if done < record.num_drafted:  # deeper budgets would have given the same
                done, ranks, count = most, list[int](), 0
                for node in order:
                    if depths[node] <= most:
                        if node in walk:
                            ranks.append(count)
                        count += 1
            levels = min(most, drafted)
            for g in range(FIRST[place], width):
                n, cell = NODES[g], place * width + g
                if n > nodes:
                    break
                self._tries[cell] += unit
                self._gain[cell] += unit * bisect_right(ranks, n - 1)
                self._kept[cell] += unit * min(n, count)
                self._levels[cell] += unit * levels

    def _rescale(self) -> None:
        for column in (self._tries, self._gain, self._kept, self._levels):
            column[:] = [value / self._unit for value in column]
        self._unit = 1.0

    def sums(self) -> list[tuple[float, ...]]:
        """Rounds, accepted tokens, kept nodes, depth reached: by depth, then by nodes, in rounds."""
        self._rescale()
        return [tuple(column) for column in (self._tries, self._gain, self._kept, self._levels)]

    def row(self, place: int, gains: Seq[float]) -> list[Cell]:
        """The budgets of a depth by place in NODES; what was never tried follows its neighbours.

        place: in DEPTHS. gains[d]: expected tokens by depth alone, which say how a deeper tree would do; looked at
        whenever rows are worked out anew, which is only as far as they are asked for.
        """
        while len(self._rows) <= place:
            self._rows.append(self._refined(len(self._rows), gains))
        return self._rows[place]

    def _refined(self, place: int, gains: Seq[float]) -> list[Cell]:
        width, unit, tries_of = len(NODES), self._unit, self._tries
        row: list[Cell] = [(0.0, 0.0, 0.0, 0.0)] * FIRST[place]
        for g in range(FIRST[place], width):
            if g > FIRST[place]:
                expected, kept, levels = _wider(row, place, g)
            elif place:
                expected, kept, levels = _deeper(self._rows, place, g, gains)
            else:
                expected, kept, levels = _GUESS[0][0], 1.0, 1.0
            cell = place * width + g
            tries = tries_of[cell] / unit
            if tries:
                expected = (self._gain[cell] / unit + WEIGHT * expected) / (tries + WEIGHT)
                expected = max(expected, row[-1][0]) if row else expected  # more nodes never bring less
                share = min(1.0, tries) / tries_of[cell]  # one round says more of sizes than a guess does
                kept += share * (self._kept[cell] - kept * tries_of[cell])
                levels += share * (self._levels[cell] - levels * tries_of[cell])
            row.append((expected, kept, levels, tries))
        return row


def _wider(row: Seq[Cell], place: int, g: int) -> tuple[float, float, float]:
    """A guess of the next number of nodes from the last, and from how often that was used up.

    Gain grows in proportion or by the part of what is missing, whichever is less.
    """
    (less, kept, levels, _), guess, depth = row[g - 1], _GUESS[place], DEPTHS[place]
    before = row[g - 2][1] if g - 2 >= FIRST[place] else 0.0
    # Sizes are learnt from different rounds, so that a larger one may have kept fewer.
    used = min(1.0, max(0.0, (kept - before) / (NODES[g - 1] - (NODES[g - 2] if before else 0))))
    missing = (depth - less) * (depth - guess[g]) / (depth - guess[g - 1])
    more = max(0.0, min(less * guess[g] / guess[g - 1], depth - missing) - less)
    return less + used * more, kept + used * (NODES[g] - NODES[g - 1]), levels


def _deeper(rows: Seq[Seq[Cell]], place: int, g: int, gains: Seq[float]) -> tuple[float, float, float]:
    """A guess of the next depth from the last, and from how often that was reached."""
    (less, kept, levels, _), depth, above = rows[-1][g], DEPTHS[place], DEPTHS[place - 1]
    before, at = (rows[-2][g][2], DEPTHS[place - 2]) if place > 1 else (0.0, 0)
    reached = min(1.0, max(0.0, (levels - before) / (above - at)))
    further = gains[min(depth, len(gains) - 1)] / max(gains[min(above, len(gains) - 1)], 1e-9)
    return less * (1 + reached * max(0.0, further - 1)), kept, levels + reached * (depth - above)
