"""Simulated drafters of trees, whose confidences have a known accuracy; without a model and without tokens."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.interfaces import DraftBudget
from paceline.core.nodes import Tree
from paceline.methods.space import drafter as space

EASY = (0.92, 0.03, 0.01)
FAIR = (0.55, 0.2, 0.08, 0.05, 0.03, 0.02)
HARD = (0.25, 0.14, 0.1, 0.07, 0.05, 0.04, 0.03, 0.03)


def text(easy: float, fair: float) -> Callable[[random.Random], tuple[float, ...]]:
    """Draws the probabilities of tokens that are easy, fair or hard to predict, with these shares of the first two."""
    return lambda rng: EASY if (u := rng.random()) < easy else FAIR if u < easy + fair else HARD


USUAL = text(0.3, 0.5)


def over_confident(probs: tuple[float, ...]) -> list[float]:
    """Confidences that are too high: 0.55 and 0.73 for probabilities of 0.25 and 0.5, at most 0.97."""
    return [min(0.97, p**0.45) for p in probs]


@dataclass(frozen=True)
class Branching:
    """Trees as in EAGLE-2, grown level by level.

    draw_probs: draws the true probabilities of a node's children, in descending order.
    confidences: makes the drafter's confidences of them.
    worth: (request, text position) -> factor on the true probabilities.
    width: the most children of a node, and the most nodes of a level that get children.
    """

    draw_probs: Callable[[random.Random], tuple[float, ...]] = USUAL
    confidences: Callable[[tuple[float, ...]], list[float]] = list
    worth: Callable[[int, int], float] = lambda request, position: 1.0
    width: int = 8

    def grow(self, budget: DraftBudget, depth: int, request: int, position: int, rng: random.Random) -> "DraftTree":
        """Draft level by level, keep the best nodes, and walk with the target as far as it goes."""
        parents, confidences, score, depths, levels = [-1], [1.0], [1.0], [0], 0
        children = dict[int, int]()  # node -> the child that the target would emit, 0 for none
        frontier = [0] if depth else []
        while frontier and levels < depth:
            levels, newest = levels + 1, list[int]()
            for node in frontier:
                probs, first = self.draw_probs(rng)[: self.width], len(parents)
                u = rng.random() / max(1e-9, self.worth(request, position + depths[node]))
                children[node] = 0
                for rank, confidence in enumerate(self.confidences(probs)):
                    if sum(probs[:rank]) <= u < sum(probs[: rank + 1]):
                        children[node] = first + rank
                    newest.append(len(parents))
                    parents.append(node)
                    confidences.append(confidence)
                    score.append(score[node] * confidence)
                    depths.append(levels)
            best = max(newest, key=lambda node: score[node])
            frontier = sorted({*newest}.intersection(worth(score, budget)), key=lambda n: -score[n])[: self.width]
            path = [best]
            while parents[path[0]]:
                path.insert(0, parents[path[0]])
            if (
                frontier
                and budget.should_continue is not None
                and not budget.should_continue([confidences[node] for node in path])
            ):
                break
        kept = [0, *sorted(worth(score, budget))]
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        path, node = list[int](), children.get(0, 0)
        while node and node in place:
            path.append(place[node])
            node = children.get(node, 0)
        return DraftTree(
            [place[parents[node]] for node in kept],
            path,
            [confidences[node] for node in kept[1:]],
            max(depths[node] for node in kept),
            levels,
        )


@dataclass(frozen=True)
class Marginal:
    """Trees whose probabilities depend on the depth only, as from mask tokens: the best nodes of all combinations.

    accept_probs: the mean acceptance probability of the top token at each depth, given its ancestors. Half of the time
        it is higher by `spread`, else lower.
    width: the number of tokens at each depth. worth: as in `Branching`.
    """

    accept_probs: tuple[float, ...]
    width: int = 1
    spread: float = 0.2
    worth: Callable[[int, int], float] = lambda request, position: 1.0

    def grow(self, budget: DraftBudget, depth: int, request: int, position: int, rng: random.Random) -> "DraftTree":
        """Rank every combination of tokens, keep the best nodes, and walk with the target as far as it goes."""
        levels, right, top_probs = list[list[float]](), list[int](), list[float]()
        for level in range(min(depth, len(self.accept_probs))):
            first = self.accept_probs[level] + (self.spread if rng.random() < 0.5 else -self.spread)
            first = min(0.97, max(0.01, first))
            probs = [first, *((1 - first) * part for part in (0.3, 0.15, 0.08))][: self.width]
            u = rng.random() / max(1e-9, self.worth(request, position + level))
            levels.append(probs)
            ranks = range(len(probs))
            right.append(next((rank for rank in ranks if sum(probs[:rank]) <= u < sum(probs[: rank + 1])), -1))
            top_probs.append(first)
            if level + 1 < depth and budget.should_continue is not None and not budget.should_continue(top_probs):
                break
        paths: dict[tuple[int, ...], float] = {(): 1.0}
        for level, probs in enumerate(levels):
            before = sorted((path for path in paths if len(path) == level), key=lambda path: -paths[path])
            for path in before[: max(1, budget.nodes)]:
                paths.update({(*path, rank): paths[path] * chance for rank, chance in enumerate(probs)})
        found = sorted(paths, key=lambda path: (len(path), path))
        kept = [found[node] for node in worth([paths[path] for path in found], budget)]
        place: dict[tuple[int, ...], int] = {(): 0} | {
            path: node for node, path in enumerate(sorted(kept, key=lambda p: (len(p), p)), start=1)
        }
        walk = list[int]()
        while tuple(right[: len(walk) + 1]) in place and len(walk) < len(right):
            walk.append(place[tuple(right[: len(walk) + 1])])
        parents, confidences = [-1], list[float]()
        for path in list(place)[1:]:
            parents.append(place[path[:-1]])
            confidences.append(levels[len(path) - 1][path[-1]])
        return DraftTree(parents, walk, confidences, max(map(len, place)), len(levels))


def worth(scores: Sequence[float], budget: DraftBudget) -> list[int]:
    """The best nodes but the root, best first, as far as the budget goes."""
    best = sorted(range(1, len(scores)), key=lambda node: (-scores[node], node))[: budget.nodes]
    return [node for n, node in enumerate(best) if scores[node] >= budget.min_prob(n)]


@dataclass(frozen=True)
class DraftTree:
    """A tree, root first, its accepted path, its depth, and the number of levels that were drafted."""

    parents: list[int]
    path: list[int]
    confidences: list[float]
    depth: int
    levels: int


def with_masks(tree: DraftTree, budget: DraftBudget, num_masks: int, remaining: int) -> tuple[DraftTree, int, int]:
    """What SPACE makes of a tree: the kept part, the masks in it, and how many tokens they predict after the walk."""
    nodes, size = Tree.of(range(len(tree.parents)), tree.parents), len(tree.parents)
    made, confidences = space.with_masks((nodes, tree.confidences), budget, num_masks, remaining, size)
    kept = made.part(made.candidates)
    masks = [len(space.masks_below(made, node, size)) for node in made.candidates]
    place = {node: index for index, node in enumerate(kept.token_ids)}
    path = [place[node] for node in tree.path if node in place]
    predicted = max(masks[node] - distance for distance, node in enumerate([0, *path][::-1]))
    grown = DraftTree(kept.parents, path, confidences, max(kept.depths), tree.levels)
    return grown, sum(masks), max(0, predicted)


def stairs(steepness: Callable[[int], float], multiple: int) -> Callable[[int], float]:
    """T(n) = 10 ms times `steepness` of n rounded up to `multiple`."""
    return lambda n: 0.010 * steepness(math.ceil(n / multiple) * multiple)


def steep(n: int) -> float:
    """T(8)/T(1) = 1.7, T(16)/T(1) = 3.2: a CPU without bfloat16 instructions."""
    return 1 + 0.1 * (n - 1) if n <= 8 else 1.7 + 0.1875 * (n - 8)


def flat(n: int) -> float:
    """T(16)/T(1) = 1.3: bound by memory."""
    return 1 + 0.02 * (n - 1)
