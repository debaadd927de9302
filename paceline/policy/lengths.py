"""How long an answer will get, learnt from those that ended: what a drafter reads for it must pay before its end.

    end of the prompt, first token  ->  the answers most like it  ->  the distribution of their lengths

By the mean length of all, each "yes" would pay for a draft that only a caption needs.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from operator import itemgetter
from typing import final

from ..core.request import Sequence

REMEMBERED = 128
"""Answers that are remembered."""
PROMPT_END = 32
"""Tokens of a prompt's end that are compared; runs of one token (the placeholders of an image) count once."""
SHARPNESS = 5
"""An answer counts by the likeness of its prompt (Jaccard) to this power."""
OTHERS = 0.05
"""Weight of all answers together beside the like ones: they decide where this answer has outlived those."""
CUT = 2
"""An answer that was cut by its limit counts as this many times as long."""
ENOUGH = 4
"""The number of longer answers that must be known before waiting is considered."""
LONGEST_WAIT = 16  # tokens


@final
class Ends:
    """The distribution of an answer's length: answers that ended, with weights.

    Every question is about the answers beyond some length, so the sums from each length on are kept.
    """

    def __init__(self, known: Iterable[tuple[float, int]] = ()):
        """known: (weight, tokens) of each answer; only the ratios of weights matter, and a weight of 0 is none."""
        ordered = sorted((one for one in known if one[0] > 0), key=itemgetter(1))
        self._ends = [tokens for _, tokens in ordered]
        self._weights = _sums_from([weight for weight, _ in ordered])
        self._tokens = _sums_from([weight * tokens for weight, tokens in ordered])

    @property
    def longest(self) -> int:
        """Tokens of the longest; 0 where nothing is known."""
        return self._ends[-1] if self._ends else 0

    def left(self, emitted: int, limit: int) -> float:
        """Expected further tokens of an answer that has `emitted` ones; at most `limit` more may come.

        The weighted mean of L - t over answers with L > t. A guess, half of what may come, is mixed in while few are
        known: it counts for 1 / (1 + n)^3 of an answer where n are.
        """
        weight, tokens, count = self._beyond(emitted)
        guess = (1 + count) ** -3
        mean = (count * (tokens / weight - emitted) if count else 0.0) + guess * limit / 2
        return max(1.0, min(mean / (count + guess), limit))

    def continue_probs(self, emitted: int, depth: int) -> list[float]:
        """For each drafted token the chance that it can count, if those before it did: the answer is so long. [depth].

        Token i (from 0) of a draft counts where i + 2 tokens are still to come, the target's own being one of them:
        P(L - t >= i + 2 | L - t >= i + 1). The guess of `left` is an answer that never ends.
        """
        weight, _, count = self._beyond(emitted)
        if count == self._beyond(emitted + depth)[2]:  # none ends so soon
            return [1.0] * depth
        share, guess = count / weight, (1 + count) ** -3
        reach = [guess + share * self._beyond(emitted + i)[0] for i in range(depth + 1)]
        return [after / before for before, after in pairwise(reach)]

    def should_wait(self, emitted: int, gain: float, price: float) -> bool:
        """Whether it is better to read the text some tokens later, because many answers may have ended by then.

            value(w) = sum over answers longer than t + w of gain * (L - t - w) - price

        gain: the seconds that each token saves once the text was read.
        price: the seconds of reading.
        """
        if self._beyond(emitted)[2] < ENOUGH:
            return False

        def value(wait: int) -> float:
            weight, tokens, _ = self._beyond(emitted + wait)
            return gain * (tokens - weight * (emitted + wait)) - price * weight

        now = value(0)
        return any(value(wait) > now for wait in range(1, LONGEST_WAIT + 1))

    def _beyond(self, emitted: int) -> tuple[float, float, int]:
        """Of the answers with more tokens than that: their weights, weights times tokens, and how many they are."""
        first = bisect_right(self._ends, emitted)
        return self._weights[first], self._tokens[first], len(self._ends) - first


def _sums_from(values: Seq[float]) -> list[float]:
    """Of all from each place on, and 0 behind the last."""
    return [*accumulate(reversed(values), initial=0.0)][::-1]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that ended."""

    prompt: frozenset[int]
    first: list[int]  # its first token; empty for an answer without tokens
    tokens: int


@final
class Lengths:
    """The last answers, and which of them are most like one in the making."""

    def __init__(self) -> None:
        self._seen = deque[_Answer](maxlen=REMEMBERED)
        self._added = 0
        self._found: dict[int, tuple[object, Ends]] = {}  # by slot, with what it was looked up for

    def add(self, seq: Sequence) -> None:
        tokens = seq.num_output * (CUT if seq.finish_reason == "length" else 1)
        self._seen.append(_Answer(_prompt_end(seq), seq.output_ids[:1], tokens))
        self._added += 1

    def of(self, seq: Sequence) -> Ends:
        """The expected length of this answer.

        It is looked up anew once its first token is there, when the known answers are few or have doubled, and where
        it has outlived all of them and there are new ones.
        """
        key: object = (min(self._added, 8), self._added.bit_length(), seq.num_output > 0)
        known, ends = self._found.get(seq.slot, (None, Ends()))
        if seq.num_output >= ends.longest:
            key = (self._added, seq.num_output > 0)
        if known != key:
            ends = self._look_up(seq)
            self._found[seq.slot] = key, ends
        return ends

    def release(self, slot: int) -> None:
        self._found.pop(slot, None)

    def _look_up(self, seq: Sequence) -> Ends:
        prompt, first, seen = _prompt_end(seq), seq.output_ids[:1], self._seen
        began_alike = [one.first == first for one in seen]
        if not any(began_alike):
            began_alike = [True] * len(seen)
        template = prompt.intersection(*(one.prompt for one in seen))  # tokens of every prompt say nothing
        likeness = [
            _likeness(prompt - template, one.prompt - template) if began else 0.0
            for one, began in zip(seen, began_alike, strict=True)
        ]
        # As many as half the square root of the known answers decide, and those that are as like as the last of them.
        nearest = sorted(likeness)[-max(1, round(len(seen) ** 0.5 / 2)) :]
        weights = [alike**SHARPNESS if alike >= nearest[0] else 0.0 for alike in likeness]
        others = OTHERS * sum(weights) / max(1, len(seen))
        return Ends((weight + others, one.tokens) for weight, one in zip(weights, seen, strict=True))


def _prompt_end(seq: Sequence) -> frozenset[int]:
    return frozenset(islice((token for token, _ in groupby(reversed(seq.prompt_ids))), PROMPT_END))


def _likeness(one: frozenset[int], other: frozenset[int]) -> float:
    """The share of their tokens that both hold (Jaccard), and a little more, so that strangers count alike."""
    return 0.01 + len(one & other) / max(1, len(one | other))
