"""Whether two sources of sampled answers have the same distribution, from the first tokens of many answers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ..measure.chi_square import LEAST, ChiSquare, against, between, least_shift, total
from .answers import NUM_TOP, Answer
from .record import SampledTest

TOKENS = 6
"""Tokens of a sampled answer: enough that drafts have a part in it."""
FALSE_ALARM = 1e-4
"""The probability that an audit of servers without fault fails by its tests of distributions, all together."""
_END = "\x00"  # behind an answer; no text holds it


def samples_of(answers: Sequence[Answer], with_tokens: bool) -> list[tuple[str, ...]]:
    """What is compared of answers: their tokens, or their characters where a side lists none."""
    return [(*(token.text for token in one.tokens), _END) if with_tokens else (*one.text, _END) for one in answers]


def cells_of(first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]]) -> list[tuple[int, int]]:
    """The two samples counted by how answers begin.

    A beginning is divided by what follows it as long as both samples together have enough of each part; what is rarer
    goes into one cell for each beginning. The division depends on the pooled sample alone, so the counts of two equal
    distributions are a random division of each cell.
    """
    least, cells, rare = math.ceil(2 * LEAST), list[tuple[int, int]](), (0, 0)
    waiting: list[tuple[int, Sequence[tuple[str, ...]], Sequence[tuple[str, ...]]]] = [(0, first, second)]
    while waiting:
        depth, ours, theirs = waiting.pop()
        counts = [Counter(one[depth] for one in side if len(one) > depth) for side in (ours, theirs)]
        rest = [len(side) for side in (ours, theirs)]
        for follower, count in (counts[0] + counts[1]).items():
            if count >= least:
                a, b = ([one for one in side if one[depth : depth + 1] == (follower,)] for side in (ours, theirs))
                rest = [rest[0] - len(a), rest[1] - len(b)]
                waiting.append((depth + 1, a, b))
        if sum(rest) >= least:
            cells.append((rest[0], rest[1]))
        else:
            rare = (rare[0] + rest[0], rare[1] + rest[1])
    if sum(rare):
        cells.append(rare)
        if sum(rare) < least and len(cells) > 1:
            cells.pop()
            smallest = min(range(len(cells)), key=lambda at: sum(cells[at]))
            cells[smallest] = (cells[smallest][0] + rare[0], cells[smallest][1] + rare[1])
    return cells


def two_sided(name: str, pairs: Sequence[tuple[Sequence[Answer], Sequence[Answer]]], num_tests: int) -> SampledTest:
    """Test the samples of two sides to each prompt against each other, in one test.

    num_tests: of the audit, which share its probability of a false alarm.
    """
    parts, size = list[ChiSquare](), 0.0
    for ours, theirs in pairs:
        listed = all(one.tokens for side in (ours, theirs) for one in side if one.text)
        parts.append(between(cells_of(samples_of(ours, listed), samples_of(theirs, listed))))
        size += len(ours) * len(theirs) / max(len(ours) + len(theirs), 1)
    return _test(name, parts, sum(len(ours) + len(theirs) for ours, theirs in pairs), TOKENS, size, num_tests)


def exact(name: str, pairs: Sequence[tuple[Sequence[Answer], Mapping[str, float]]], num_tests: int) -> SampledTest:
    """Test first tokens against known log-probabilities of the most likely ones; all others are one cell.

    Without tokens: against the likely ones with which the texts begin, the longest.
    """
    parts, size = list[ChiSquare](), 0
    for answers, law in pairs:
        names = sorted(law, key=len, reverse=True)
        probs = [math.exp(law[name]) for name in names]
        firsts = (next((at for at, name in enumerate(names) if _begins(one, name)), len(names)) for one in answers)
        parts.append(against(Counter(firsts), [*probs, max(0.0, 1 - sum(probs))]))
        size += len(answers)
    return _test(name, parts, size, 1, size, num_tests)


def by_rank(name: str, answers: Sequence[Answer], num_tests: int) -> SampledTest | None:
    """Test all sampled tokens against the log-probabilities listed beside them; None where none are.

    At each position the token is the most likely one, the second, ... or none of the listed, with known probabilities
    given what came before. The counts of these ranks less the sums of their probabilities are sums of martingale
    differences, whose covariance is the sum of those of one draw: nearly normal, however the positions depend.
    """
    laws, drawn = list[list[float]](), list[int]()
    for token in (token for answer in answers for token in answer.tokens if token.top and token.logprob is not None):
        likely = sorted(token.top, key=token.top.__getitem__, reverse=True)[:NUM_TOP]
        laws.append([math.exp(token.top[text]) for text in likely] + [0.0] * (NUM_TOP - len(likely)))
        drawn.append(likely.index(token.text) if token.text in likely else NUM_TOP)
    if not laws:
        return None
    probs = np.array(laws)  # [draws, ranks]; what is left of 1 is the last cell
    kept = int((probs.sum(0) >= 2 * LEAST).sum())  # they fall from rank to rank
    while kept and len(laws) - probs[:, :kept].sum() < LEAST:
        kept -= 1
    probs, ranks = probs[:, :kept], np.array(drawn)
    excess = np.array([(ranks == rank).sum() for rank in range(kept)]) - probs.sum(0)
    covariance = np.diag(probs.sum(0)) - probs.T @ probs
    statistic = float(excess @ np.linalg.pinv(covariance) @ excess) if kept else 0.0
    return _test(name, [ChiSquare(statistic, kept)], len(answers), TOKENS, len(laws), num_tests)


def _begins(answer: Answer, text: str) -> bool:
    """Whether this is the first token, or the first word where tokens are not listed."""
    return answer.tokens[0].text == text if answer.tokens else bool(text) and answer.text.startswith(text)


def _test(name: str, parts: Sequence[ChiSquare], samples: int, tokens: int, size: float, num_tests: int) -> SampledTest:
    whole, alarm = total(parts), FALSE_ALARM / max(num_tests, 1)
    shift = least_shift(size, whole.freedom, alarm) if whole.freedom else 1.0
    return SampledTest(name, samples, tokens, whole.p_value, alarm, shift)
