"""The distribution of several tokens where p and q depend on the path: chains and trees, fractions and tensors."""

from collections.abc import Callable
from functools import cache

import pytest
from drafted_trees import Drafted, draw_tree, emitted, tensors
from enumeration import Weights, distance, output_distribution
from mutants import RULES, Rule
from toy_distributions import path_distribution, product_distribution

from paceline.core.draft import Law
from paceline.core.walk import TargetDistribution
from paceline.verify import Ratio, ratio
from paceline.verify.rejection import Chance
from paceline.verify.walk import descend

pytestmark = pytest.mark.usefixtures("unchecked_types")  # thousands of walks
P, Q = path_distribution(1, 3), path_distribution(2, 3)
CHAIN, R3, R4, R5 = (
    RULES[name][0] for name in ("R1 chain", "R3 delta", "R4 siblings i.i.d.", "R5 siblings without replacement")
)
LENGTH = 3
Path = tuple[int, ...]
Seen = Callable[[Path, Path], Path]
"""(path of the node, path of the root) -> the path whose distribution is used there."""


def right(path: Path, root: Path) -> Path:
    return path


def one_round(
    rule: Rule, shape: tuple[int, ...], prefix: Path, chance: Chance, p_seen: Seen = right, q_seen: Seen = right
) -> Path:
    """What one draft and its verification emit, by the library's own walk."""
    drafted = draw_tree(rule, Q, shape, prefix, chance)

    def decide(node: int, depth: int, children: list[int]) -> tuple[int | None, int]:
        p, q = P(p_seen(drafted.paths[node], prefix)), Q(q_seen(drafted.paths[node], prefix))
        index, owed = rule.judge(p, q, [drafted.tokens[child] for child in children], chance.coin)
        return (None, chance.draw(owed)) if index is None else (children[index], -1)

    walk = descend(drafted.tree, decide)
    return emitted(drafted, walk.path, walk.next_token)


def joint_output(round_output: Callable[[Path], Weights], prefix: Path = ()) -> Weights:
    """The first tokens of round upon round: each starts where the one before it ended."""
    found: Weights = {}
    for tokens, weight in round_output(prefix).items():
        path = prefix + tokens
        rest = {path[:LENGTH]: 1} if len(path) >= LENGTH else joint_output(round_output, path)
        for key, mass in rest.items():
            found[key] = found.get(key, 0) + weight * mass
    return found


def bias(rule: Rule, shape: tuple[int, ...], p_seen: Seen = right, q_seen: Seen = right) -> float:
    @cache
    def round_output(prefix: Path) -> Weights:
        return output_distribution(lambda chance: one_round(rule, shape, prefix, chance, p_seen, q_seen))

    return distance(joint_output(round_output), product_distribution(P, LENGTH))


SHAPES = [(CHAIN, (1, 1)), (CHAIN, (1, 1, 1)), (R3, (2, 2)), (R4, (2, 1)), (R5, (2, 1)), (R5, (1, 2))]


@pytest.mark.parametrize(("rule", "shape"), SHAPES)
def test_three_tokens_follow_the_product_exactly(rule: Rule, shape: tuple[int, ...]) -> None:
    assert bias(rule, shape) == 0


WRONG_NODES = {
    "p of the root everywhere": (lambda path, root: root, right),
    "p of the parent": (lambda path, root: path[:-1] if len(path) > len(root) else path, right),
    "q of the root everywhere": (right, lambda path, root: root),
    "p of the node's last token alone": (lambda path, root: path[-1:], right),
}


@pytest.mark.parametrize("name", WRONG_NODES)
def test_wrong_node_is_caught(name: str) -> None:
    def guarded(rule: Rule) -> Rule:  # a wrong q may rule the drawn token out: let such a token stand
        def judge(p, q, candidates, coin):
            if any(q[token] == 0 for token in candidates):
                return 0, p
            return rule.judge(p, q, candidates, coin)

        return Rule(rule.propose, judge)

    p_seen, q_seen = WRONG_NODES[name]
    assert bias(guarded(CHAIN), (1, 1), p_seen, q_seen) > 0.01


LAWS = [
    (Law.POINT_MASS, R3, (2, 2)),
    (Law.POINT_MASS, R4, (2, 1)),
    (Law.IID, CHAIN, (1, 1, 1)),
    (Law.IID, R4, (2, 1)),
    (Law.WITHOUT_REPLACEMENT, R5, (2, 1)),
]


def tensor_output(monkeypatch: pytest.MonkeyPatch, law: Law, rule: Rule, shape: tuple[int, ...]) -> Weights:
    """The output distribution of `Ratio.verify` itself, its random decisions scripted, continued by plain decoding."""

    def program(chance: Chance) -> Path:
        drafted = draw_tree(rule, Q, shape, (), chance)
        monkeypatch.setattr(ratio, "Keyed", lambda seed, position, siblings: chance)
        decoy = Drafted([0], [-1], [(0,)])  # another row, shorter: padding and row numbers matter
        draft, target = tensors([decoy, drafted], P, Q, law)
        target = TargetDistribution(target.scores, [True, False])  # the other row decides nothing at random
        walk = Ratio().verify(draft, target, [1, 2], [7, 5])[1]
        return emitted(drafted, walk.path, walk.next_token)

    completed: Weights = {}
    for tokens, weight in output_distribution(program).items():
        for path, mass in product_distribution(P, max(0, LENGTH - len(tokens)), tokens).items():
            completed[path[:LENGTH]] = completed.get(path[:LENGTH], 0) + float(weight) * float(mass)
    return completed


@pytest.mark.parametrize(("law", "rule", "shape"), LAWS)
def test_ratio_verifier_follows_the_product(monkeypatch, law: Law, rule: Rule, shape: tuple[int, ...]) -> None:
    assert distance(tensor_output(monkeypatch, law, rule, shape), product_distribution(P, LENGTH)) < 1e-12


@pytest.mark.parametrize(
    ("law", "rule", "shape"), [(Law.IID, R3, (2, 1)), (Law.WITHOUT_REPLACEMENT, R3, (2, 1)), (Law.IID, R5, (2, 1))]
)
def test_ratio_verifier_given_the_wrong_law_is_caught(monkeypatch, law: Law, rule: Rule, shape) -> None:
    p, q = path_distribution(3, 3, zeros=0), path_distribution(10, 3, zeros=0)
    monkeypatch.setitem(globals(), "P", p)  # without zeros every token is a possible draw
    monkeypatch.setitem(globals(), "Q", q)  # less than p on two tokens: the residual has a choice
    assert distance(tensor_output(monkeypatch, law, rule, shape), product_distribution(P, LENGTH)) > 0.01
