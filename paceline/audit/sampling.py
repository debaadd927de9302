"""Whether two sources of sampled answers have the same distribution, from the first tokens of many answers."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ..measure.chi_square import LEAST, ChiSquare, at_least, between, least_shift, total
from .answers import NUM_TOP, Answer
from .record import SampledTest

TOKENS = 6
"""Tokens of a sampled answer: enough that drafts have a part in it."""
FALSE_ALARM = 1e-4
"""The probability that an audit of servers without fault fails by its tests of distributions, all together."""
_END = "\x00"  # behind an answer; no text holds it
_SAME_NATS = 0.1  # servers round log-probabilities; tokens that are further apart are two with one text


def samples_of(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    """What is compared of answers: the characters of their texts.

    Unlike their tokens, all engines write these alike, apart from blanks at both ends and from parts of characters.
    """
    return [(*one.text.replace("\ufffd", "").strip(), _END) for one in answers]


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
        parts.append(between(cells_of(samples_of(ours), samples_of(theirs))))
        size += len(ours) * len(theirs) / max(len(ours) + len(theirs), 1)
    return _test(name, parts, sum(len(ours) + len(theirs) for ours, theirs in pairs), TOKENS, size, num_tests)


def exact(name: str, pairs: Sequence[tuple[Sequence[Answer], Mapping[str, float]]], num_tests: int) -> SampledTest:
    """Test first tokens against known log-probabilities of the most likely ones; all others are one cell.

    Other tokens may have such a text as well, so each probability is a lower bound, and what they leave may be
    anywhere. Without tokens listed: how texts begin, where a beginning that holds another one is counted as that.
    """
    parts, size, unknown = list[ChiSquare](), 0, 0.0
    for answers, law in pairs:
        listed, words = all(one.tokens for one in answers if one.text), defaultdict[str, float](float)
        visible = {text: text.strip() for text in law if _is_visible(text)}
        for text, word in visible.items():
            held = [word] if listed else [one for one in visible.values() if word.startswith(one)]
            words[min(held, key=len)] += math.exp(law[text])
        cells = [word for word, prob in words.items() if prob * len(answers) >= LEAST]
        firsts = (next((at for at, word in enumerate(cells) if _begins(one, word, listed)), -1) for one in answers)
        seen = Counter(at if at >= 0 else len(cells) for at in firsts)
        parts.append(at_least(seen, [*(words[word] for word in cells), 0.0]))
        size, unknown = size + len(answers), unknown + len(answers) * max(0.0, 1 - sum(words[word] for word in cells))
    test = _test(name, parts, size, 1, size, num_tests)
    return test._replace(least_shift=min(1.0, test.least_shift + unknown / max(size, 1)))


def by_rank(name: str, answers: Sequence[Answer], num_tests: int) -> SampledTest | None:
    """Test all sampled tokens against the log-probabilities listed beside them; None where none are.

    At each position the token is the most likely one, the second, ... or none of the listed, with known probabilities
    given what came before. The counts of these ranks less the sums of their probabilities are sums of martingale
    differences, whose covariance is the sum of those of one draw: nearly normal, however the positions depend.

    What is counted at a position must not depend on what was drawn there. A server lists the token that it drew besides
    the likely ones, and of several with one text a single one: so only as many ranks count as each position has, and
    a position with parts of characters among them, which may all be U+FFFD, is left out.
    """
    listed = [token for answer in answers for token in answer.tokens if token.top and token.logprob is not None]
    sizes = [len(token.top) for token in listed if all(map(_is_whole, token.top))]
    depth, laws, drawn = min([NUM_TOP, *sizes]), list[list[float]](), list[int]()
    for token in listed:
        likely = sorted(token.top, key=token.top.__getitem__, reverse=True)[:depth]
        if len(likely) < depth or not all(map(_is_whole, likely)):
            continue
        laws.append([math.exp(token.top[text]) for text in likely])
        is_likely = token.text in likely and abs(token.top[token.text] - (token.logprob or 0.0)) < _SAME_NATS
        drawn.append(likely.index(token.text) if is_likely else depth)
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


def _is_whole(text: str) -> bool:
    """Whether this is the text of one token alone."""
    return bool(text) and "\ufffd" not in text


def _is_visible(text: str) -> bool:
    """Whether a token of this text shows in that of an answer, as tokens that end one do not."""
    return _is_whole(text) and bool(text.strip()) and not text.startswith(("bytes:", "<", "["))


def _begins(answer: Answer, word: str, listed: bool) -> bool:
    """Whether this is the first token, or how the text begins where tokens are not listed."""
    first = answer.tokens[0].text.strip() if answer.tokens else ""
    return first == word if listed else answer.text.lstrip().startswith(word)


def _test(name: str, parts: Sequence[ChiSquare], samples: int, tokens: int, size: float, num_tests: int) -> SampledTest:
    whole, alarm = total(parts), FALSE_ALARM / max(num_tests, 1)
    shift = least_shift(size, whole.freedom, alarm) if whole.freedom else 1.0
    return SampledTest(name, samples, tokens, whole.p_value, alarm, shift)
