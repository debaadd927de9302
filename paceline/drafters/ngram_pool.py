"""A pool of n-grams and the tree of candidates that it gives: what Lookahead and Ouroboros share."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Annotated, Literal, TypeAlias, final

from pydantic import Field

from ..core.interfaces import DraftBudget
from ..core.request import Sequence

Scope: TypeAlias = Literal["request", "prompt", "shared"]
"""What a pool holds: n-grams of the answer, of its prompt too, or of all requests so far."""
PoolSize: TypeAlias = Annotated[int, Field(ge=1, le=1 << 20)]
"""The most n-grams of one pool."""


@final
class NgramPool:
    """The newest n-grams by their first token. What was not added for the longest time goes first.

    ngram: the tokens of each n-gram, N.
    guesses: the most n-grams with the same first token, G.
    size: the most n-grams in all.
    banned_token_ids: n-grams with any of these are not taken.
    """

    def __init__(self, ngram: int, guesses: int, size: int, banned_token_ids: frozenset[int] = frozenset()):
        self.ngram, self.guesses, self.size, self._banned = ngram, guesses, size, banned_token_ids
        # first token -> what follows it; of both the oldest first
        self._known: dict[int, dict[tuple[int, ...], None]] = {}
        self._count = 0

    def __len__(self) -> int:
        """The n-grams that it holds."""
        return self._count

    def add(self, tokens: Seq[int]) -> None:
        """Take one n-gram, or note that it was seen again."""
        if not self._banned.isdisjoint(tokens):
            return
        first, rest = tokens[0], tuple(tokens[1:])
        mine = self._known[first] = self._known.pop(first, {})
        if rest in mine:
            del mine[rest]
        elif len(mine) == self.guesses:
            del mine[next(iter(mine))]
        else:
            self._count += 1
        mine[rest] = None
        if self._count > self.size:
            first, oldest = next(iter(self._known.items()))
            del oldest[next(iter(oldest))]
            self._count -= 1
            if not oldest:
                del self._known[first]

    def read(self, text: Seq[int], begin: int) -> int:
        """Take the n-grams of a text that start at `begin` or later; returns where the next one will start."""
        end = max(begin, len(text) - self.ngram + 1)
        for start in range(max(begin, end - self.size), end):
            self.add(text[start : start + self.ngram])
        return end

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The N - 1 tokens that may follow, newest first."""
        return [*reversed(self._known.get(token, {}))]


def add_branches(
    ids: list[int], parents: list[int], phrases: Iterable[Seq[int]], seq: Sequence, budget: DraftBudget
) -> None:
    """Add phrases behind the last node of a chain, as far as the budget goes; what begins alike is added once.

    Nothing is added behind a token that would end the answer. ids, parents: the chain, root first; they grow.
    """
    stem, children = len(ids) - 1, dict[tuple[int, int], int]()
    for phrase in phrases:
        node = stem
        for depth, token in enumerate(phrase[: max(0, budget.depth - stem)], start=stem + 1):
            if (node, token) not in children:
                if len(ids) > budget.nodes:
                    return
                children[node, token] = len(ids)
                ids.append(token)
                parents.append(node)
            node = children[node, token]
            if seq.would_end(token, depth):
                break
