"""A pool of n-grams and the candidates from it, shared by Lookahead and Ouroboros."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, final

from pydantic import Field

from ..core.request import TokenSequence
from ..errors import ConfigError, IncompatibleModels
from ..schema import brief, validate
from ..system.files import read_kind, to_json, write_text

Scope: TypeAlias = Literal["request", "prompt", "shared"]
"""The n-grams in a pool: those of the answer, of its prompt too, or of all requests of its tenant so far."""
PoolSize: TypeAlias = Annotated[int, Field(ge=1, le=1 << 20)]
"""The most n-grams of one pool."""
_KIND, _VERSION = "paceline n-grams", 1


@final
class NgramPool:
    """The newest n-grams by their first token. The least recently added ones are dropped first.

    ngram: the tokens of each n-gram, N.
    guesses: the most n-grams with the same first token, G.
    size: the most n-grams in all.
    banned_token_ids, vocab_size: n-grams with a banned token, or with a token outside the vocabulary, are not added.
    """

    def __init__(
        self,
        ngram: int,
        guesses: int,
        size: int,
        banned_token_ids: frozenset[int] = frozenset(),
        vocab_size: int = 1 << 31,
    ):
        self.ngram, self.guesses, self.size = ngram, guesses, size
        self._banned, self._vocab_size = banned_token_ids, vocab_size
        # first token -> what follows it; of both the oldest first
        self._known: dict[int, dict[tuple[int, ...], None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tokens: Sequence[int]) -> None:
        """Add an n-gram, or make it the newest if it is there."""
        if max(tokens) >= self._vocab_size or not self._banned.isdisjoint(tokens):
            return
        first, rest = tokens[0], tuple(tokens[1:])
        guesses = self._known[first] = self._known.pop(first, {})
        if rest in guesses:
            del guesses[rest]
        elif len(guesses) == self.guesses:
            del guesses[next(iter(guesses))]
        else:
            self._count += 1
        guesses[rest] = None
        if self._count > self.size:
            first, oldest = next(iter(self._known.items()))
            del oldest[next(iter(oldest))]
            self._count -= 1
            if not oldest:
                del self._known[first]

    def read(self, text: Sequence[int], begin: int) -> int:
        """Add the n-grams of a text that start at `begin` or later; returns where the next one will start."""
        end = max(begin, len(text) - self.ngram + 1)
        for start in range(max(begin, end - self.size), end):
            self.add(text[start : start + self.ngram])
        return end

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The N - 1 tokens that may follow, newest first."""
        return [*reversed(self._known.get(token, {}))]

    def save(self, path: Path | str, vocabulary: str) -> None:
        """Write the n-grams as JSON, the oldest first. vocabulary: identifies the tokenizer of their token ids."""
        grams = [[first, *rest] for first, guesses in self._known.items() for rest in guesses]
        write_text(path, to_json({"kind": _KIND, "version": _VERSION, "vocabulary": vocabulary, "ngrams": grams}))

    def load(self, path: Path | str, vocabulary: str) -> None:
        """Add the n-grams of a file.

        Raises `ConfigError` for one that `save` did not write, or of another N, `IncompatibleModels` for one of another
        vocabulary.
        """
        name, fix = f"the pool {str(path)!r}", "name a file that Ouroboros.save wrote"
        record = read_kind(path, _KIND, _VERSION, fix)
        if (saved_for := record.get("vocabulary")) != vocabulary:
            raise IncompatibleModels(
                f"{name} was made with another tokenizer",
                got=brief(saved_for),
                expected=vocabulary,
                fix="save a pool with this target",
            )
        grams = validate(list[list[int]], record.get("ngrams"), name)
        wrong = next((gram for gram in grams if len(gram) != self.ngram or min(gram) < 0), None)
        if wrong is not None:
            raise ConfigError(
                f"{name} has a wrong n-gram", got=brief(wrong), expected=f"{self.ngram} token ids", fix=fix
            )
        for gram in grams:
            self.add(gram)


def add_branches(
    ids: list[int],
    parents: list[int],
    phrases: Iterable[Sequence[int]],
    seq: TokenSequence,
    ahead: int,
    length: int,
    nodes: int,
) -> dict[tuple[int, int], int]:
    """Add phrases after the last node of a chain; common prefixes are added once.

    Nothing is added after a token that would end the answer. Returns the new nodes by parent and token.

    ids, parents: the chain, root first; they are extended to at most `nodes` nodes without the root.
    ahead: how many places after the end of the text the first token of a phrase is, from 1.
    length: the most tokens of a phrase.
    """
    stem, children = len(ids) - 1, dict[tuple[int, int], int]()
    for phrase in phrases:
        node = stem
        for place, token in enumerate(phrase[: max(0, length)], start=ahead):
            if (node, token) not in children:
                if len(ids) > nodes:
                    return children
                children[node, token] = len(ids)
                ids.append(token)
                parents.append(node)
            node = children[node, token]
            if seq.would_end(token, place):
                break
    return children
