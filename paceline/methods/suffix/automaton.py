"""What followed each part of a text: the suffix automaton of Blumer et al. (1985), built token by token."""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Any, NamedTuple, Protocol

MAX_CONTEXT = 32
"""The most tokens of a context; a longer one does not predict better."""
TOP_K = 8
"""The most children of a node."""


class Context(NamedTuple):
    """The longest suffix of a path that occurs somewhere with a token after it.

    state: where it occurs; each `Continuations` has its own type of state.
    length: its number of tokens; 0 if not even the last token occurs.
    """

    state: Any
    length: int


NO_CONTEXT = Context(0, 0)


class Continuations(Protocol):
    """Tells what followed a context, and steps to the next context."""

    def following(self, context: Context) -> tuple[float, Sequence[tuple[int, float]]]:
        """How many tokens followed in total, and the `TOP_K` most frequent with their counts, in descending order."""
        ...

    def step(self, context: Context, token: int) -> Context:
        """The context after one more token, one of `following`."""
        ...


class SuffixAutomaton:
    """Every context of a text with what followed it: the automaton of Blumer et al. 1985, with counts for each state.

    A state represents the parts of the text that end at the same places; the longest has `_lengths` tokens. Its link
    leads to their longest suffix that also ends elsewhere. So following links shortens the context:

        text a b c a b    state of `a b` (2 occurrences)  --c-->  state of `a b c` (1)
                          link: the empty context

    Appending a token takes O(1) on average, and at most `longest` + 1 steps along links to update counts. There are at
    most two states and three edges per token: usually 0.4 KB, at most 0.8.

    longest: the most tokens of a context.
    """

    def __init__(self, longest: int = MAX_CONTEXT):
        self.longest, self.num_tokens = longest, 0
        self._edges: list[dict[int, int]] = [{}]
        self._links, self._lengths, self._newest = [-1], [0], [0]
        self._counts: list[float] = [0]
        self._whole = self._end = 0  # the states of the whole text, and of its last `longest` + 1 tokens

    def append(self, token: int) -> None:
        self.num_tokens += 1
        new = self._add_state({}, self.num_tokens, 0, 0, 0)
        at = self._whole
        while at >= 0 and token not in self._edges[at]:
            self._edges[at][token] = new
            at = self._links[at]
        if at >= 0:
            self._links[new] = self._split(at, token)
        self._whole = new
        self._end = self._of_length(self._edges[self._end][token], self.longest + 1)
        self._count(self._end)

    def context(self) -> Context:
        return self._with_edges(self._end, self.num_tokens)

    def step(self, context: Context, token: int) -> Context:
        return self._with_edges(self._edges[context.state][token], context.length + 1)

    def following(self, context: Context) -> tuple[float, Sequence[tuple[int, float]]]:
        """See `Continuations`; of equally frequent tokens the newest comes first."""
        edges, counts, newest = self._edges[context.state], self._counts, self._newest
        best = nsmallest(TOP_K, edges.items(), key=lambda edge: (-counts[edge[1]], -newest[edge[1]]))
        return sum([counts[state] for state in edges.values()]), [(token, counts[state]) for token, state in best]

    def _count(self, at: int) -> None:
        """Count the parts of a state, and all their suffixes, once more."""
        while at > 0:
            self._counts[at] += 1
            self._newest[at] = self.num_tokens
            at = self._links[at]

    def _goes_on(self, state: int) -> bool:
        """Whether something followed."""
        return bool(self._edges[state])

    def _add_state(self, edges: dict[int, int], length: int, link: int, count: float, newest: int) -> int:
        self._edges.append(edges)
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._newest.append(newest)
        return len(self._edges) - 1

    def _split(self, at: int, token: int) -> int:
        """The state of the longest part of `at` extended by this token, split from a larger state if necessary."""
        old, length = self._edges[at][token], self._lengths[at] + 1
        if self._lengths[old] == length:
            return old
        new = self._add_state(dict(self._edges[old]), length, self._links[old], self._counts[old], self._newest[old])
        self._links[old] = new
        while at >= 0 and self._edges[at].get(token) == old:
            self._edges[at][token] = new
            at = self._links[at]
        return new

    def _of_length(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of this state's parts."""
        while state and self._lengths[self._links[state]] >= length:
            state = self._links[state]
        return state

    def _with_edges(self, state: int, length: int) -> Context:
        """The longest context that has a continuation: the end of the text itself has none."""
        length = min(length, self.longest)
        state = self._of_length(state, length)
        while state and not self._goes_on(state):
            state = self._links[state]
            length = self._lengths[state]
        return Context(state, length)
