"""Answers that a tenant got, to draft from: the newest ones, counted with weights that fade.

A continuation weighs what the answers that had it add up to: 1 for each, however often the answer repeats it, half of
that after `HALF_LIFE` further answers, and 1 less for every time that it was drafted and rejected. What weighs nothing
is not drafted. So one answer cannot drown the others, and a rejected draft undoes it.
"""

from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter
from typing import final

from .automaton import NO_CONTEXT, TOP_K, Context, SuffixAutomaton

HALF_LIFE = 16
"""After so many answers of its tenant an answer counts half."""
SHORTEST = 2
"""The fewest tokens of a context: a single one is followed by too many."""
_END = -1
"""No token: nothing is drafted beyond the end of an answer."""


class WeightedAutomaton(SuffixAutomaton):
    """The continuations of many texts. now: the number of the newest one, from 1 on."""

    now = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Append a text, the one with the number `now`."""
        for token in (*tokens, _END):
            self.append(token)

    def context(self, tokens: Sequence[int] = (), at_least: int = 1) -> Context:
        """The longest suffix of these tokens that occurs and goes on, of `at_least` to `longest` tokens."""
        found = self._with_edges(*self._match(tokens[-self.longest :]))
        return found if found.length >= at_least else NO_CONTEXT

    def following(self, context: Context) -> tuple[float, Sequence[tuple[int, float]]]:
        """See `Continuations`; the counts are weights. Of equal ones the token that was seen first comes last."""
        edges = reversed(self._edges[context.state].items())
        weights = [(token, weight) for token, to in edges if token != _END and (weight := self._weight(to)) > 0]
        return sum(weight for _, weight in weights), nlargest(TOP_K, weights, key=itemgetter(1))

    def reject(self, tokens: Sequence[int]) -> None:
        """Take 1 from the weight of the last token in the context of those before, and in all its suffixes."""
        at, _ = self._match(tokens[-self.longest - 1 :])
        while at > 0:
            self._counts[at], self._newest[at] = max(0.0, self._weight(at) - 1), self.now
            at = self._links[at]

    def _weight(self, state: int) -> float:
        return self._counts[state] * 0.5 ** ((self.now - self._newest[state]) / HALF_LIFE)

    def _count(self, at: int) -> None:
        """Count a text once: the suffixes of what it had before were counted then."""
        while at > 0 and self._newest[at] < self.now:
            self._counts[at], self._newest[at] = self._weight(at) + 1, self.now
            at = self._links[at]

    def _goes_on(self, state: int) -> bool:
        return any(token != _END and self._weight(to) > 0 for token, to in self._edges[state].items())

    def _with_edges(self, state: int, length: int) -> Context:
        found = super()._with_edges(state, length)
        return found if found.length >= SHORTEST else NO_CONTEXT

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The state and the length of the longest suffix of these tokens that occurs."""
        state = length = 0
        for token in tokens:
            while state and token not in self._edges[state]:
                state = self._links[state]
                length = self._lengths[state]
            if token in self._edges[state]:
                state, length = self._edges[state][token], length + 1
        return state, length


@final
class Answers:
    """The last answers of a tenant, in two halves: the older one is dropped when the newer one is full.

    num_tokens: of both together, at most; about 0.4 KB each, and at most 0.8.
    """

    def __init__(self, num_tokens: int):
        self._half, self._now = num_tokens // 2, 0
        self.halves = [WeightedAutomaton(), WeightedAutomaton()]  # the newer one first

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer; of one that does not fit its end."""
        answer = answer[-self._half + 1 :]
        if self.halves[0].num_tokens + len(answer) >= self._half:
            self.halves = [WeightedAutomaton(), self.halves[0]]
        self._now += 1
        for half in self.halves:
            half.now = self._now
        self.halves[0].add(answer)

    def reject(self, tokens: Sequence[int]) -> None:
        """See `WeightedAutomaton.reject`."""
        for half in self.halves:
            half.reject(tokens)
