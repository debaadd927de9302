"""Trees against slow and obvious forms: brute force over whole law trees."""

import itertools
import math
import random

import pytest

from paceline.core.interfaces import DraftBudget
from paceline.core.nodes import Tree
from paceline.methods.heads.trees import MC_SIM_7B_63, DynamicTree, Grown, StaticTree, draft_of

Path = tuple[int, ...]
ROOT = 99


class Laws:
    """A made-up law after every path: tokens and log-probabilities, best first. `exact`: certainties and ties."""

    def __init__(self, seed: int, width: int = 4, exact: bool = False):
        self.seed, self.width, self.exact = seed, width, exact

    def __call__(self, path: Path) -> tuple[list[int], list[float]]:
        rng = random.Random(f"{self.seed}{path}")
        tokens = rng.sample(range(50), self.width)
        if self.exact:  # powers of two add up exactly, log 1 = 0 ties with the parent
            kind = rng.choice(["certain", "halves", "quarters"])
            weights = {"certain": [1.0, 0.0, 0.0, 0.0], "halves": [0.5, 0.5, 0.0, 0.0], "quarters": [0.25] * 4}[kind]
            return tokens, [math.log2(w) if w else -math.inf for w in weights]
        weights = sorted((rng.random() ** 3 for _ in tokens), reverse=True)
        return tokens, [math.log(w / sum(weights)) for w in weights]


def grow(tree: DynamicTree, laws: Laws) -> Tree:
    """As a drafter does it."""
    paths: dict[int, Path] = {0: ()}
    while tree.frontier:
        given = [laws(paths[node]) for node in tree.frontier]
        before = len(tree.tokens)
        tree.add([tokens for tokens, _ in given], [logps for _, logps in given])
        for node in range(before, len(tree.tokens)):
            paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    return tree.finish()[0]


def dynamic(depth: int, nodes: int, top_k: int, min_probs=(), kind=DynamicTree) -> DynamicTree:
    return kind(ROOT, DraftBudget(depth, nodes, min_probs=min_probs), top_k)


def paths_of(grown: Tree) -> list[Path]:
    return [tuple(grown.tokens_to(node)) for node in range(1, len(grown))]


def eagle2(laws: Laws, depth: int, nodes: int, top_k: int, min_probs=(0.0,)) -> set[Path]:
    """EAGLE-2 without any cleverness: expand the best top_k of each whole level, then sort everything."""
    pool: list[tuple[float, int, int, Path]] = []  # (-score, depth, order, path)
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for level in range(1, depth + 1):
        newest = []
        for above, path in frontier:
            tokens, logps = laws(path)
            children = zip(tokens[:top_k], logps[:top_k], strict=True)
            newest += [(above + logp, (*path, token)) for token, logp in children if logp > -math.inf]
        pool += [(-score, level, len(pool) + order, path) for order, (score, path) in enumerate(newest)]
        frontier = sorted(newest, key=lambda pair: -pair[0])[:top_k]
    best = sorted(pool)[:nodes]
    floors = [math.log(p) if p else -math.inf for p in [*min_probs, *min_probs[-1:] * nodes]]
    return {path for (score, *_, path), floor in zip(best, floors, strict=False) if -score >= floor}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 20, 100])
def test_dynamic_tree_is_eagle_2(nodes, top_k, exact):
    for seed, depth in itertools.product(range(12), (1, 2, 5)):
        laws = Laws(seed, exact=exact)
        made = grow(dynamic(depth, nodes, top_k), laws)
        assert set(paths_of(made)) == eagle2(laws, depth, nodes, top_k), (seed, depth)
        assert len(set(paths_of(made))) == len(made) - 1, "two siblings are the same token"


RISING = [*(0.02 * n for n in range(1, 9)), 0.2]


@pytest.mark.parametrize("min_probs", [[0.1], [0.0] * 7 + [0.1] * 8, RISING, [0.01, 0.01, 0.01, 0.4]])
def test_min_probs_prune(min_probs):
    for seed, exact in itertools.product(range(20), (False, True)):
        laws = Laws(seed, exact=exact)
        assert set(paths_of(grow(dynamic(5, 30, 4, min_probs), laws))) == eagle2(laws, 5, 30, 4, min_probs), seed
        static = StaticTree(ROOT, DraftBudget(5, 25, min_probs=min_probs))
        left = paths_of(grow(static, laws))
        scores = sorted((static.scores[n] for n in static.kept()), reverse=True)
        assert all(
            score >= math.log(max(p, 1e-9))
            for score, p in zip(scores, [*min_probs, *[min_probs[-1]] * 25], strict=False)
        )
        assert all(path[:-1] in {(), *left} for path in left)


def test_asking_every_node_for_the_same_is_caught(monkeypatch):
    """Mutants: what is asked of the first node, and of the last."""
    for n in (0, -1):
        monkeypatch.setattr(DraftBudget, "min_prob", lambda self, _, n=n: self.min_probs[n])
        assert any(
            set(paths_of(grow(dynamic(5, 30, 4, RISING), Laws(seed)))) != eagle2(Laws(seed), 5, 30, 4, RISING)
            for seed in range(20)
        )


def test_min_probs_may_leave_nothing():
    assert grow(dynamic(5, 30, 4, [0.999]), Laws(0)).token_ids == [ROOT]
    assert grow(StaticTree(ROOT, DraftBudget(5, 25, min_probs=[0.999])), Laws(0)).token_ids == [ROOT]


class KeepsTheDeeper(DynamicTree):
    """On a tie the later node wins: a child may lose its parent."""

    def kept(self):
        return sorted(
            sorted(range(1, len(self.tokens)), key=lambda node: (-self.scores[node], -node))[: len(self._best)]
        )


class ForgetsTheScoreAbove(DynamicTree):
    """Ranks by the last step alone."""

    def kept(self):
        return sorted(sorted(range(1, len(self.tokens)), key=lambda node: -self.logps[node])[: len(self._best)])


class ExpandsTooLittle(DynamicTree):
    """Only the best node of a level."""

    def next_frontier(self):
        return super().next_frontier()[:1]


@pytest.mark.parametrize("mutant", [KeepsTheDeeper, ForgetsTheScoreAbove, ExpandsTooLittle])
def test_mutants_are_caught(mutant):
    caught = 0
    for seed, exact in itertools.product(range(12), (False, True)):
        laws = Laws(seed, exact=exact)
        try:
            caught += set(paths_of(grow(dynamic(5, 7, 4, kind=mutant), laws))) != eagle2(laws, 5, 7, 4)
        except KeyError:  # a child without its parent
            caught += 1
    assert caught


def test_small_budgets_feed_few_rows():
    """No row is fed whose children could not be kept: a certain chain of 4 nodes never feeds a sibling."""
    for seed, nodes in itertools.product(range(20), (1, 2, 4, 8)):
        tree, fed, laws = dynamic(6, nodes, 4), 0, Laws(seed)
        paths: dict[int, Path] = {0: ()}
        while tree.frontier:
            given = [laws(paths[node]) for node in tree.frontier]
            before = len(tree.tokens)
            tree.add([g[0] for g in given], [g[1] for g in given])
            paths |= {n: (*paths[tree.parents[n]], tree.tokens[n]) for n in range(before, len(tree.tokens))}
            assert len(tree.frontier) <= min(4, nodes - 1) or not tree.frontier
            fed += len(tree.frontier)
        assert fed <= 5 * max(0, nodes - 1)


def test_the_best_path():
    tree, laws = dynamic(3, 50, 3), Laws(3)
    tree.add(*([part] for part in laws(())))
    assert tree.best_path() == [pytest.approx(math.exp(laws(())[1][0]))]
    tree.add(*map(list, zip(*(laws((tree.tokens[node],)) for node in tree.frontier), strict=True)))
    best = max((a + b, (a, b)) for t, a in zip(*laws(()), strict=True) for b in laws((t,))[1])
    assert tree.best_path() == pytest.approx([math.exp(x) for x in best[1]])


def test_static_tree_is_the_table():
    laws = Laws(1, width=6)
    made = grow(StaticTree(ROOT, DraftBudget(9, 63)), laws)
    expected = set()
    for ranks in MC_SIM_7B_63:
        path: Path = ()
        for rank in ranks:
            path = (*path, laws(path)[0][rank])
        expected.add(path)
    assert set(paths_of(made)) == expected
    assert len(MC_SIM_7B_63) == len(made) - 1 == 25


@pytest.mark.parametrize("nodes", range(26))
def test_a_small_budget_gets_a_part_of_the_table(nodes):
    for depth in range(6):
        laws = Laws(2, width=6)
        paths = paths_of(grow(StaticTree(ROOT, DraftBudget(depth, nodes)), laws))
        levels = min(depth, nodes)
        assert len(paths) == min(nodes, sum(len(path) <= levels for path in MC_SIM_7B_63))
        for *above, token in paths:
            siblings = laws(tuple(above))[0]
            assert all((*above, earlier) in paths for earlier in siblings[: siblings.index(token)])


def marginal(budget: DraftBudget, given: list[tuple[list[int], list[float]]]) -> Grown:
    tree = DynamicTree(ROOT, budget, 4, len(given), width=budget.nodes)
    while tree.frontier:
        tokens, logps = given[tree.level]
        tree.add([tokens] * len(tree.frontier), [logps] * len(tree.frontier))
    return tree.finish()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 40])
def test_tree_from_marginals_is_the_best(nodes, exact):
    """Over all trees: the nodes with the highest products, which is what sorting every path gives."""
    for seed in range(10):
        given = [Laws(seed, exact=exact)((depth,)) for depth in range(4)]
        made, sure = marginal(DraftBudget(4, nodes), given)
        every = []
        for depth in range(1, 5):
            for ranks in itertools.product(range(4), repeat=depth):
                score = sum(given[d][1][r] for d, r in enumerate(ranks))
                if score > -math.inf:
                    every.append((-score, depth, tuple(given[d][0][r] for d, r in enumerate(ranks))))
        best = sorted(every)[:nodes]
        got = [sum(math.log2(c) if exact else math.log(c) for c in _along(made, sure, n)) for n in range(1, len(made))]
        if not exact:
            assert {path for *_, path in best} == set(paths_of(made))
            assert sorted(got) == pytest.approx(sorted(-score for score, *_ in best))
        assert len(made) - 1 == len(best)
        assert all(parent < node for node, parent in enumerate(made.parents))
        assert len(set(paths_of(made))) == len(made) - 1


def test_improbable_marginals_are_left_out():
    given = [([1, 2], [math.log(0.5), math.log(0.4)]), ([3, 4], [math.log(0.5), math.log(0.1)])]
    made, _ = marginal(DraftBudget(9, 9, min_probs=[0.21]), given)
    assert paths_of(made) == [(1,), (1, 3), (2,)]


def _along(made: Tree, sure: list[float], node: int) -> list[float]:
    return [sure[on_path - 1] for on_path in made.path_to(node)]


def test_a_batch_is_padded_with_probes():
    trees = [DynamicTree(root, DraftBudget(1, nodes), 2) for root, nodes in ((7, 2), (8, 0), (9, 1))]
    trees[0].add([[1, 2]], [[math.log(0.5), math.log(0.25)]])
    trees[2].add([[3]], [[0.0]])
    draft = draft_of([one.finish() for one in trees], "tested")
    tree, sure = draft.tree, draft.confidence
    assert sure is not None
    assert tree.token_ids.tolist() == [[7, 1, 2], [8, 0, 0], [9, 3, 0]]
    assert tree.is_probe.tolist() == [[False, False, False], [False, True, True], [False, False, True]]
    assert sure.isnan().tolist() == [[True, False, False], [True, True, True], [True, False, True]]
