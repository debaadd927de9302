"""When to try again what did not pay: now and then, and ever more seldom."""

from dataclasses import dataclass
from typing import final

from .choice import Option, width
from .seconds import RoundSeconds

PROBE_DEPTH = 2
PROBE_NODES, FREE = (7, 3), 1.1  # a probe of a tree is as large as it gets for nearly the price of PROBE_DEPTH nodes
WAIT, SHORTEST, LONGEST = 4, 2, 64  # rounds


@dataclass(slots=True)
class _Patience:
    last: int  # round of the last use
    wait: int = 0  # not tried yet


@final
class Probing:
    """Exponential back-off for each request (slot) and each option of it, (drafter, hint)."""

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[str, int], _Patience]] = {}

    def is_due(self, slot: int, key: tuple[str, int], now: int) -> bool:
        """True iff the option was left alone for long enough; `now` counts rounds."""
        patience = self._known.setdefault(slot, {}).setdefault(key, _Patience(now))
        return now - patience.last >= patience.wait

    def used(self, slot: int, key: tuple[str, int], now: int, was_probe: bool, stood: bool) -> None:
        """It drafted: as a probe whose first token stood or not, or because it pays."""
        patience = self._known.setdefault(slot, {}).setdefault(key, _Patience(now))
        patience.last = now
        if not was_probe:
            patience.wait = WAIT
        elif stood:
            patience.wait = max(SHORTEST, patience.wait // 2)
        else:
            patience.wait = min(LONGEST, max(WAIT, patience.wait * 2))

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._known.pop(slot, None)


def largest_probe(
    option: Option, seconds: float, token: float, turn: RoundSeconds, credit: float, max_nodes: int
) -> tuple[int, int] | None:
    """(depth, nodes) of the largest probe whose failure can be paid for with `credit` passes.

    seconds: of reading. token: seconds of drafting one. Where masks have to be hung first, the probe takes two rounds,
    and both must be paid for before it begins.
    """

    def pass_of(depth: int, nodes: int) -> float:
        return turn.seconds(width(depth, nodes, option.masks))

    plain = turn.seconds(0)
    deepest = min(PROBE_DEPTH, option.depth, PROBE_DEPTH if not option.is_tree else max_nodes)
    for depth in range(deepest, 0, -1):
        nodes, min_prob = depth, pass_of(depth, depth)
        if option.is_tree and depth == PROBE_DEPTH:
            nodes = next((n for n in PROBE_NODES if n <= max_nodes and pass_of(depth, n) <= FREE * min_prob), depth)
        first = pass_of(depth, 0) - plain if option.restarts else 0.0
        if (pass_of(depth, nodes) + depth * token + seconds + first) / plain - 1 <= credit:
            return depth, nodes
    return None
