"""When a drafter that is not chosen is tried, and when one that has fallen behind should catch up.

A drafter is tried if a few good rounds would make it the choice, and what did not pay is tried ever more seldom. A
draft model that has to read what others emitted is an investment, which must pay before the answer ends.
"""

from dataclasses import dataclass
from typing import final

from ..core.request import Sequence
from .choice import Option, gains_of
from .estimates import FEW_TOKENS, Estimates
from .seconds import RoundSeconds

PROBE_DEPTH = 2
PROBE_NODES, FREE = (7, 3), 1.1  # a probe of a tree is as large as it gets for nearly the price of PROBE_DEPTH nodes
WAIT, SHORTEST, LONGEST = 4, 2, 64  # rounds between two tries
PROVEN = 3.0
"""Rounds of a drafter after which it is known."""
GOOD_ROUNDS, CERTAIN = 1.5, 1e9
"""A known drafter is tried if so many rounds without a rejected token, times the rounds in which it was not used over
`LONGEST`, would make it the choice. An unknown one is tried if it could ever be the choice."""
BAD_ROUNDS = 2.0
"""Reading must pay even if a request begins with so many rounds in which no token is accepted: texts differ."""
LOAN = 0.02
"""Passes per expected token that a known drafter may borrow from the ledger for reading."""
ALL_REQUESTS = -1


@dataclass(slots=True)
class _BackOff:
    last: int  # round of the last use
    wait: int = 0  # not tried yet


@final
class Probing:
    """Exponential back-off for each request (slot) and each option of it, (drafter, hint)."""

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[str, int], _BackOff]] = {}
        self._last: dict[str, int] = {}  # the round in which each drafter was last used

    def is_due(self, slot: int, key: tuple[str, int], now: int) -> bool:
        """True iff the option was left alone for long enough; `now` counts rounds."""
        back_off = self._known.setdefault(slot, {}).setdefault(key, _BackOff(now))
        return now - back_off.last >= back_off.wait

    def good_rounds(self, option: Option, now: int, tries: float) -> float:
        """The rounds of success by which a drafter is judged that was tried so often, see `GOOD_ROUNDS`."""
        if tries < PROVEN:
            return CERTAIN
        unused = (now - self._last.get(option.source, 0)) / LONGEST  # since the start for what a profile knows
        return GOOD_ROUNDS * unused

    def used(self, slot: int, key: tuple[str, int], now: int, was_probe: bool, accepted: bool) -> None:
        """Note that it drafted, either as a probe whose first token was accepted or not, or because it pays."""
        back_off = self._known.setdefault(slot, {}).setdefault(key, _BackOff(now))
        back_off.last = self._last[key[0]] = now
        if not was_probe:
            back_off.wait = WAIT
        elif accepted:
            back_off.wait = max(SHORTEST, back_off.wait // 2)
        else:
            back_off.wait = min(LONGEST, max(WAIT, back_off.wait * 2))

    def release(self, slot: int) -> None:
        self._known.pop(slot, None)


def largest_probe(
    option: Option, seconds: float, token: float, round_seconds: RoundSeconds, max_nodes: int, replaces: float
) -> tuple[int, int] | None:
    """(depth, nodes) of the largest probe whose failure the option's credit can pay for.

    Where masks have to be added first, the probe takes two rounds, and both must be paid for before it begins.

    seconds: the time to read the text.
    token: the time of a drafting step.
    replaces: the expected speed of what it takes the place of, over plain decoding.
    """

    def pass_of(nodes: int) -> float:
        return round_seconds.of(round_seconds.nodes(nodes + option.probes, 1))

    plain = round_seconds.of(0)
    deepest = min(PROBE_DEPTH, option.depth, max_nodes if option.is_tree else PROBE_DEPTH)
    for depth in range(deepest, 0, -1):
        nodes = depth
        if option.is_tree and depth == PROBE_DEPTH:
            limit = FREE * pass_of(depth)
            nodes = next((n for n in PROBE_NODES if n <= max_nodes and pass_of(n) <= limit), depth)
        first = pass_of(min(depth, option.masks)) - plain if option.restarts else 0.0
        if (pass_of(nodes) + option.steps(depth) * token + seconds + first) / plain * replaces - 1 <= option.credit:
            return depth, nodes
    return None


def owner(seq: Sequence, option: Option) -> int:
    """Whose back_off a probe tries: the request's (its slot) or, if much has to be read for it, everybody's."""
    return seq.slot if option.uncached_tokens <= FEW_TOKENS else ALL_REQUESTS


def may_join(seq: Sequence, option: Option, round_seconds: RoundSeconds, known: Estimates) -> bool:
    """Whether the planner may choose this option; a refused option may still be probed.

    Refused are rows and drafters in debt, unknown drafters with much to read, and drafters that should read later,
    since more answers will have ended by then.
    """
    if option.credit <= 0:
        return False
    if option.uncached_tokens <= FEW_TOKENS:
        return True
    if known.acceptance.tries(option.source) < PROVEN:
        return False
    if option.reading > (option.credit + LOAN * option.horizon) * round_seconds.of(0):
        return False
    return could_pay(seq, option, round_seconds, known, 0.0, 1.0)


def could_pay(
    seq: Sequence, option: Option, round_seconds: RoundSeconds, known: Estimates, good: float, replaces: float
) -> bool:
    """Whether drafting would pay before the answer ends, reading included.

    good: the rounds without a rejected token that are assumed to come first.
    replaces: the expected speed of what would be done otherwise, over plain decoding.
    """
    bad = BAD_ROUNDS if option.uncached_tokens > FEW_TOKENS else 0.0
    accept = known.acceptance.after(seq.slot, option.source, option.hint, good, bad)
    ends = option.ends.continue_probs(option.emitted, option.depth)
    gains = enumerate(gains_of([a * goes_on for a, goes_on in zip(accept, ends, strict=False)]))
    token = known.cost(option.source).token.value
    best = min(
        (round_seconds.of(d + option.probes * (d > 0)) + option.steps(d) * token) / (1 + gain) for d, gain in gains
    )
    saved = round_seconds.of(0) / replaces - best  # seconds a token, at the best depth
    if option.ends.should_wait(option.emitted, saved, option.reading):
        return False
    return saved * option.horizon > option.reading
