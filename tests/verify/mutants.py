"""One-step rules, right and wrong. Each mutant is a bug some decoder had; the tests must refuse every one.

A rule is how candidates are proposed from q and how the target judges them. The right ones call the library; a mutant
differs from one of them in a single place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from enumeration import Weights, exact, output_distribution

from paceline.verify.rejection import Chance, Coin, acceptance, iid, point_mass, residual, without, without_replacement

Probs = np.ndarray
Verdict = tuple[int | None, Probs]


@dataclass(frozen=True)
class Rule:
    """propose: (q, how many, chance) -> candidates. judge: (p, q, candidates, coin) -> what the library returns."""

    propose: Callable[[Probs, int, Chance], list[int]]
    judge: Callable[[Probs, Probs, Sequence[int], Coin], Verdict]

    def emit(self, p: Probs, q: Probs, count: int, chance: Chance) -> int:
        candidates = self.propose(q, count, chance)
        index, owed = self.judge(p, q, candidates, chance.coin)
        return chance.draw(owed) if index is None else candidates[index]

    def output(self, p: Probs, q: Probs, count: int) -> Weights:
        return output_distribution(lambda chance: self.emit(p, q, count, chance))


def draw_iid(q: Probs, count: int, chance: Chance) -> list[int]:
    return [chance.draw(q) for _ in range(count)]


def draw_distinct(q: Probs, count: int, chance: Chance) -> list[int]:
    drawn: list[int] = []
    for _ in range(min(count, sum(mass > 0 for mass in q))):
        drawn.append(chance.draw(q))
        q = without(q, drawn[-1])
    return drawn


def top(q: Probs, count: int, chance: Chance) -> list[int]:
    """The most probable tokens under q: a point mass each."""
    return sorted(range(len(q)), key=lambda token: -q[token])[:count]


def judge_point_mass(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    return point_mass(p, candidates, coin)


def match(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    """R2: draw y from p, here by one coin a token, and look for it among the candidates."""
    left = Fraction(1)
    for y, mass in enumerate(p.tolist()):
        if mass > 0 and coin(mass / left):
            found = [index for index, token in enumerate(candidates) if token == y]
            return (found[0], p) if found else (None, exact([int(y == other) for other in range(len(p))]))
        left -= mass
    raise AssertionError("p does not sum to 1")


RULES = {
    "R1 chain": (Rule(draw_iid, iid), 1),
    "R2 match": (Rule(top, match), 2),
    "R3 delta": (Rule(top, judge_point_mass), 3),
    "R3 delta, tokens drawn, one twice": (Rule(draw_iid, judge_point_mass), 2),
    "R3 delta, tokens drawn without replacement": (Rule(draw_distinct, judge_point_mass), 2),
    "R4 siblings i.i.d.": (Rule(draw_iid, iid), 3),
    "R5 siblings without replacement": (Rule(draw_distinct, without_replacement), 3),
    "no candidate": (Rule(draw_iid, iid), 0),
}


def _resample_all_of_p(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    index, _ = iid(p, q, candidates, coin)
    return index, p


def _softmax_residual(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    index, owed = iid(p, q, candidates, coin)
    return index, owed if index is not None else exact([Fraction(math.exp(mass)) for mass in owed])


def _original_q(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    return iid(p, q, candidates, coin)  # for candidates drawn without replacement


def _same_p_for_all(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    for index, token in enumerate(candidates):
        if coin(acceptance(p, q, token)):
            return index, p
    return None, residual(p, q)


def _wrong_sign(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    return iid(p, q, candidates, lambda probability: not coin(probability))


def _swapped_residual(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    index, _ = iid(p, q, candidates, coin)
    return index, p if index is not None else residual(q, p)


def _keeps_refused(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    index, _ = point_mass(p, candidates, coin)
    return index, p


def _drop_own_low(q: Probs, count: int, chance: Chance) -> list[int]:
    return [token for token in draw_iid(q, count, chance) if q[token] >= Fraction(1, 4)]


def _draw_top_two(q: Probs, count: int, chance: Chance) -> list[int]:
    kept = top(q, 2, chance)
    return draw_iid(exact([q[token] if token in kept else 0 for token in range(len(q))]), count, chance)


def _judge_iid_as_distinct(p: Probs, q: Probs, candidates: Sequence[int], coin: Coin) -> Verdict:
    return without_replacement(p, q, list(dict.fromkeys(candidates)), coin)


MUTANTS = {
    "all of p after a rejection (SPACE's code)": (Rule(draw_iid, _resample_all_of_p), 1),
    "argmax tokens with soft q": (Rule(top, iid), 1),
    "softmax over the residual": (Rule(draw_iid, _softmax_residual), 1),
    "original q, drawn without replacement": (Rule(draw_distinct, _original_q), 3),
    "own weak token dropped": (Rule(_drop_own_low, iid), 1),
    "drawn from the top two of q, raw q handed over": (Rule(_draw_top_two, iid), 1),
    "U on the wrong side": (Rule(draw_iid, _wrong_sign), 1),
    "residual of q over p": (Rule(draw_iid, _swapped_residual), 1),
    "every sibling tried against all of p": (Rule(draw_iid, _same_p_for_all), 3),
    "refused point masses drawn again": (Rule(top, _keeps_refused), 2),
    "i.i.d. siblings made distinct, judged as without replacement": (Rule(draw_iid, _judge_iid_as_distinct), 3),
}
