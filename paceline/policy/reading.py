"""Whether a draft model that has fallen behind should catch up: an investment that must pay before the answer ends."""

from collections.abc import Sequence as Seq

from ..core.request import Sequence
from .choice import Option, gains_of
from .estimates import FEW, Estimates
from .seconds import RoundSeconds

PROVEN = 3.0
"""Rounds of a drafter after which it is known."""
LOAN = 0.02
"""Passes per token to come that may be lent to a known drafter for reading."""
EVERYBODY = -1


def owner(seq: Sequence, option: Option) -> int:
    """Whose patience a probe tries: the request's (its slot) or, if much has to be read for it, everybody's."""
    return seq.slot if option.uncached_tokens <= FEW else EVERYBODY


def may_join(option: Option, credit: float, turn: RoundSeconds, known: Estimates) -> bool:
    """Rows in debt stay out; so do drafters with much to read that nobody knows: they have to pass a probe.

    So do those that had better read later, when more answers have ended. credit: passes that this row may lose.
    """
    if credit <= 0:
        return False
    if option.uncached_tokens <= FEW:
        return True
    if known.acceptance.tries(option.source) < PROVEN:
        return False
    saved = _saved(option, turn, known, option.gains)
    if option.ends.had_better_wait(option.emitted, saved, option.reading):
        return False
    return option.reading <= (credit + LOAN * option.horizon) * turn.seconds(0)


def could_pay(option: Option, turn: RoundSeconds, known: Estimates) -> bool:
    """Whether drafting would pay before the answer ends, reading included, and now rather than later, if all stood.

    Of what reading took the first few times, which may disagree, it is nearer to the most.
    """
    reading = known.cost(option.source).uncached_tokens.cautious * option.uncached_tokens
    saved = _saved(option, turn, known, gains_of(option.ends.continue_probs(option.emitted, option.depth)))
    if option.ends.had_better_wait(option.emitted, saved, reading):
        return False
    return saved * option.horizon > reading


def _saved(option: Option, turn: RoundSeconds, known: Estimates, gains: Seq[float]) -> float:
    """Seconds that a token of this drafter takes less than a plain one, at its best depth; gains: by depth."""
    token = known.cost(option.source).token.value
    best = min((turn.seconds(d) + d * token) / (1 + gain) for d, gain in enumerate(gains))
    return turn.seconds(0) - best
