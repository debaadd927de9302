"""How long an answer will get, learnt from those that ended: what a drafter reads for it must pay before its end.

    prompt's last tokens, first token  ->  the answers most like it  ->  their lengths, as a law of this answer's

A yes among captions is told from them by its question ("Is there ...?") and by its first token ("yes"). In traffic of
both, the mean length would make each yes pay for a draft that only a caption needs.
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
"""Answers."""
TAIL = 32
"""Tokens of a prompt's end by which it is known, runs of one token (a picture's placeholders) counting once."""
OTHERS = 0.05
"""What all answers count, over what one of the nearest does: they speak where this one has outlived those."""
SHARPNESS = 5
"""Each of the nearest counts likeness to this power."""
UNSETTLED = 8
"""Up to so many known answers each new one counts at once, then whenever they have doubled."""
CUT = 2
"""An answer that its limit cut is taken for one so many times as long."""
ENOUGH = 4
"""Longer answers that must be known before it is asked whether waiting is better."""
LONGEST_WAIT = 16  # tokens


@final
class Ends:
    """The law of an answer's length: weights of answers that ended, of each length as many as there were.

    Everything that is asked is about those beyond some length, so sums from each length on are kept.
    """

    def __init__(self, known: Iterable[tuple[float, int]] = ()):
        """known: (weight, tokens) of each answer; only how weights compare matters, and 0 is none."""
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

        The weighted mean of L - t over answers with L > t. A guess, half of what may come, stands in while few are
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
        share, guess = (count / weight if count else 0.0), (1 + count) ** -3
        reach = [guess + share * self._beyond(emitted + i)[0] for i in range(depth + 1)]
        return [after / before for before, after in pairwise(reach)]

    def had_better_wait(self, emitted: int, gain: float, price: float) -> bool:
        """Whether reading some tokens later is worth more: many answers may have ended by then.

        value(w) = sum over answers longer than t + w of gain * (L - t - w) - price

        gain: seconds that each token saves once it was read. price: seconds of reading.
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
    """One that ended."""

    asked: frozenset[int]
    first: list[int]  # token, or none of an answer without any
    tokens: int


@final
class Lengths:
    """The last answers, and which of them are most like one in the making."""

    def __init__(self) -> None:
        self._seen = deque[_Answer](maxlen=REMEMBERED)
        self._added = 0
        self._found: dict[int, tuple[tuple[int, bool], int, Ends]] = {}  # by slot: for what it was looked up, and when

    def add(self, seq: Sequence) -> None:
        """Learn from an answer that ended."""
        tokens = seq.num_output * (CUT if seq.finish_reason == "length" else 1)
        self._seen.append(_Answer(_asked(seq), seq.output_ids[:1], tokens))
        self._added += 1

    def of(self, seq: Sequence) -> Ends:
        """What may be expected of this answer: looked up anew with its first token, and where it outlives what was."""
        settled = max(0, self._added.bit_length() - UNSETTLED.bit_length())
        key = min(self._added, UNSETTLED) + settled, seq.num_output > 0
        then, added, ends = self._found.get(seq.slot, (None, 0, None))
        if ends is None or then != key or (added < self._added and seq.num_output >= ends.longest):
            ends = self._look(seq)
            self._found[seq.slot] = key, self._added, ends
        return ends

    def release(self, slot: int) -> None:
        """Forget the request in this slot; what its answer taught stays."""
        self._found.pop(slot, None)

    def _look(self, seq: Sequence) -> Ends:
        asked, first, seen = _asked(seq), seq.output_ids[:1], self._seen
        template = len(asked.intersection(*(one.asked for one in seen)))
        began = [i for i, one in enumerate(seen) if one.first == first] or range(len(seen))
        like = {i: _likeness(asked, seen[i].asked, template) for i in began}
        ranked = sorted(like.values(), reverse=True)[: nearest(len(seen))]
        near = {i: alike**SHARPNESS for i, alike in like.items() if alike >= ranked[-1]}
        others = OTHERS * sum(near.values()) / max(1, len(seen) * len(ranked))
        return Ends((near.get(i, 0.0) + others, one.tokens) for i, one in enumerate(seen))


def nearest(known: int) -> int:
    """How many answers speak for a new one, where so many are known; besides, those as like it as the last of them."""
    return max(1, round(known**0.5 / 2))


def _asked(seq: Sequence) -> frozenset[int]:
    return frozenset(islice((token for token, _ in groupby(reversed(seq.prompt_ids))), TAIL))


def _likeness(one: frozenset[int], other: frozenset[int], template: int) -> float:
    """The share of their tokens that both hold (Jaccard), and a little more, so that strangers count alike.

    template: how many tokens all prompts hold; they say nothing.
    """
    both = len(one & other)
    return 0.01 + (both - template) / max(1, len(one) + len(other) - both - template)
