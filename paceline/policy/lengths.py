"""How long answers get, learnt from those that ended: what a drafter reads for an answer must pay before its end."""

from collections import deque
from itertools import pairwise
from typing import final

REMEMBERED = 64
"""Answers."""
ENOUGH = 4
"""Longer answers that must be known before it is asked whether waiting is better."""
LONGEST_WAIT = 16  # tokens


@final
class Lengths:
    """Tokens of the last answers."""

    def __init__(self) -> None:
        self._seen = deque[int](maxlen=REMEMBERED)

    def add(self, tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._seen.append(tokens)

    def left(self, emitted: int, limit: int) -> float:
        """Expected further tokens of an answer that has `emitted` ones; at most `limit` more may come.

        The mean of L - t over answers with L > t. A guess, half of what may come, stands in while few are known: it
        counts for 1 / (1 + n)^2 of an answer where n are.
        """
        longer = [tokens - emitted for tokens in self._seen if tokens > emitted]
        weight = (1 + len(longer)) ** -2
        mean = (sum(longer) + weight * limit / 2) / (len(longer) + weight)
        return max(1.0, min(mean, limit))

    def goes_on(self, emitted: int, depth: int) -> list[float]:
        """For each drafted token the chance that it can count, if those before it did: the answer is so long. [depth].

        Token i (from 0) of a draft counts where i + 2 tokens are still to come, the target's own being one of them:
        P(L - t >= i + 2 | L - t >= i + 1). The guess of `left` is an answer that never ends.
        """
        longer = [tokens - emitted for tokens in self._seen if tokens > emitted]
        weight = (1 + len(longer)) ** -2
        reach = [weight + sum(left > i for left in longer) for i in range(depth + 1)]
        return [after / before for before, after in pairwise(reach)]

    def had_better_wait(self, emitted: int, gain: float, price: float) -> bool:
        """Whether reading some tokens later is worth more: many answers may have ended by then.

        value(w) = sum over answers longer than t + w of gain * (L - t - w) - price

        gain: seconds that each token saves once it was read. price: seconds of reading.
        """
        longer = [tokens - emitted for tokens in self._seen if tokens > emitted]
        if len(longer) < ENOUGH:
            return False

        def value(wait: int) -> float:
            return sum(gain * (tokens - wait) - price for tokens in longer if tokens > wait)

        now = value(0)
        return any(value(wait) > now for wait in range(1, LONGEST_WAIT + 1))
