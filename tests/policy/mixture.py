"""A simulated target with experts: which of them rows choose, and what passes that read them take."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """Rows choose experts of one layer; what a pass reads of them takes time beside its rows.

    each: the seconds of an expert. made_up, alike: the novelty of rows of made-up tokens, and of one token repeated.
    """

    count: int = 128
    chosen: int = 8
    each: float = 0.0008
    made_up: float = 1.0
    alike: float = 0.1

    def read(self, trees: Sequence[tuple[Sequence[int], float]], rng: random.Random) -> int:
        """The experts that a pass reads. trees: parents, and the chance that a node has another expert than its parent,
        for each of them.
        """
        found = set[int]()
        for parents, novelty in trees:
            rows = list[list[int]]()
            for parent in parents:
                new = rng.sample(range(self.count), self.chosen)
                old = rows[parent] if parent >= 0 else new
                rows.append([a if rng.random() < novelty else b for a, b in zip(new, old, strict=True)])
            found.update(*rows)
        return len(found)

    def plain(self, batch: int) -> float:
        """The experts that the roots of a batch read in the mean."""
        return self.count * (1 - (1 - self.chosen / self.count) ** batch)
