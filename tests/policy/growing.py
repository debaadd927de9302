"""A simulated drafter of trees: EAGLE-2's growth with confidences of known worth, no model and no tokens."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.interfaces import DraftBudget

EASY = (0.92, 0.03, 0.01)
FAIR = (0.55, 0.2, 0.08, 0.05, 0.03, 0.02)
HARD = (0.25, 0.14, 0.1, 0.07, 0.05, 0.04, 0.03, 0.03)


def text(easy: float, fair: float) -> Callable[[random.Random], tuple[float, ...]]:
    """Laws of tokens that are easy, fair or hard to guess, with these shares of the first two."""
    return lambda rng: EASY if (u := rng.random()) < easy else FAIR if u < easy + fair else HARD


USUAL = text(0.3, 0.5)


def over_confident(law: tuple[float, ...]) -> list[float]:
    """What is worth 0.25 or 0.5 is told as 0.55 or 0.8: `law` to the power of 0.4 or so, never above 0.97."""
    return [min(0.97, p**0.45) for p in law]


@dataclass(frozen=True)
class Branching:
    """law: draws the true chances of a node's children, likeliest first. told: the confidences made of them.

    worth: (request, text position) -> part of the true chances that comes true. width: children of a node, and nodes of
    a level that get children.
    """

    law: Callable[[random.Random], tuple[float, ...]] = USUAL
    told: Callable[[tuple[float, ...]], list[float]] = list
    worth: Callable[[int, int], float] = lambda request, position: 1.0
    width: int = 8

    def grow(self, budget: DraftBudget, depth: int, request: int, position: int, rng: random.Random) -> "DraftTree":
        """Draft level by level, keep the best nodes, and walk with the target as far as it goes."""
        parents, sure, score, depths, levels = [-1], [1.0], [1.0], [0], 0
        children = dict[int, int]()  # node -> the child that the target would emit, 0 for none
        frontier = [0] if depth else []
        while frontier and levels < depth:
            levels, newest = levels + 1, list[int]()
            for node in frontier:
                law, first = self.law(rng)[: self.width], len(parents)
                u = rng.random() / max(1e-9, self.worth(request, position + depths[node]))
                children[node] = 0
                for rank, confidence in enumerate(self.told(law)):
                    if sum(law[:rank]) <= u < sum(law[: rank + 1]):
                        children[node] = first + rank
                    newest.append(len(parents))
                    parents.append(node)
                    sure.append(confidence)
                    score.append(score[node] * confidence)
                    depths.append(levels)
            best = max(newest, key=lambda node: score[node])
            kept = sorted(range(1, len(parents)), key=lambda node: (-score[node], node))[: budget.nodes]
            able = sorted(
                set(newest) & {node for node in kept if score[node] >= budget.min_prob}, key=lambda n: -score[n]
            )
            frontier = able[: self.width]
            path = [best]
            while parents[path[0]]:
                path.insert(0, parents[path[0]])
            if (
                frontier
                and budget.should_continue is not None
                and not budget.should_continue([sure[node] for node in path])
            ):
                break
        kept = sorted(range(1, len(parents)), key=lambda node: (-score[node], node))[: budget.nodes] if levels else []
        kept = [0, *sorted(node for node in kept if score[node] >= budget.min_prob)]
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        path, node = list[int](), children.get(0, 0)
        while node and node in place:
            path.append(place[node])
            node = children.get(node, 0)
        return DraftTree(
            [place[parents[node]] for node in kept],
            path,
            [sure[node] for node in kept[1:]],
            max(depths[node] for node in kept),
            levels,
        )


@dataclass(frozen=True)
class Foreseen:
    """Trees of one law for each depth, as masks give them, whatever the path: the best nodes of all.

    stands: chance that the likeliest token of each depth stands, those before it standing. Half of the laws are surer
    by `spread`, the others less sure. width: tokens of a law. worth: as in `Branching`.
    """

    stands: tuple[float, ...]
    width: int = 1
    spread: float = 0.2
    worth: Callable[[int, int], float] = lambda request, position: 1.0

    def grow(self, budget: DraftBudget, depth: int, request: int, position: int, rng: random.Random) -> "DraftTree":
        """Rank every combination of tokens, keep the best nodes, and walk with the target as far as it goes."""
        laws, right, sure = list[list[float]](), list[int](), list[float]()
        for level in range(min(depth, len(self.stands))):
            first = self.stands[level] + (self.spread if rng.random() < 0.5 else -self.spread)
            first = min(0.97, max(0.01, first))
            law = [first, *((1 - first) * part for part in (0.3, 0.15, 0.08))][: self.width]
            u = rng.random() / max(1e-9, self.worth(request, position + level))
            laws.append(law)
            right.append(next((rank for rank in range(len(law)) if sum(law[:rank]) <= u < sum(law[: rank + 1])), -1))
            sure.append(first)
            if level + 1 < depth and budget.should_continue is not None and not budget.should_continue(sure):
                break
        paths: dict[tuple[int, ...], float] = {(): 1.0}
        for level, law in enumerate(laws):
            before = sorted((path for path in paths if len(path) == level), key=lambda path: -paths[path])
            for path in before[: max(1, budget.nodes)]:
                paths.update({(*path, rank): paths[path] * chance for rank, chance in enumerate(law)})
        best = sorted((path for path in paths if path), key=lambda path: (-paths[path], len(path), path))
        kept = [path for path in best[: budget.nodes] if paths[path] >= budget.min_prob]
        place: dict[tuple[int, ...], int] = {(): 0} | {
            path: node for node, path in enumerate(sorted(kept, key=lambda p: (len(p), p)), start=1)
        }
        walk = list[int]()
        while tuple(right[: len(walk) + 1]) in place and len(walk) < len(right):
            walk.append(place[tuple(right[: len(walk) + 1])])
        parents, told = [-1], list[float]()
        for path in list(place)[1:]:
            parents.append(place[path[:-1]])
            told.append(laws[len(path) - 1][path[-1]])
        return DraftTree(parents, walk, told, max(map(len, place)), len(laws))


@dataclass(frozen=True)
class DraftTree:
    """A tree, root first, what stood of it, its depth, and the levels it took."""

    parents: list[int]
    path: list[int]
    confidences: list[float]
    depth: int
    levels: int


def stairs(steepness: Callable[[int], float], multiple: int) -> Callable[[int], float]:
    """T(n) = 10 ms times `steepness` of n rounded up to `multiple`."""
    return lambda n: 0.010 * steepness(math.ceil(n / multiple) * multiple)


def steep(n: int) -> float:
    """T(8)/T(1) = 1.7, T(16)/T(1) = 3.2: a CPU without bfloat16 instructions."""
    return 1 + 0.1 * (n - 1) if n <= 8 else 1.7 + 0.1875 * (n - 8)


def flat(n: int) -> float:
    """T(16)/T(1) = 1.3: bound by memory."""
    return 1 + 0.02 * (n - 1)
