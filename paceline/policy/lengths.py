"""How long answers get: what a drafter reads for one must pay before its end."""

from bisect import bisect_right, insort
from collections import deque
from typing import final

from .constants import REMEMBERED


@final
class Lengths:
    """The tokens of the last answers that ended."""

    def __init__(self) -> None:
        self._last, self._sorted = deque[int](), list[int]()

    def add(self, tokens: int, was_cut: bool) -> None:
        """was_cut: the answer might have gone on, and counts as twice as long."""
        if len(self._last) == REMEMBERED:
            self._sorted.remove(self._last.popleft())
        self._last.append(tokens * (1 + was_cut))
        insort(self._sorted, self._last[-1])

    def left(self, emitted: int, limit: int) -> float:
        """Expected further tokens of an answer that has `emitted` ones; at most `limit` more may come.

        The mean of what longer answers had to come then. A guess, half of what may come, counts for one more of them.
        """
        longer = self._sorted[bisect_right(self._sorted, emitted) :]
        left = sum(longer) - emitted * len(longer)
        guess = (1 + len(longer)) ** -3
        return max(1.0, min((left + guess * limit / 2) / (len(longer) + guess), limit))
