"""What verifiers promise besides the distribution: shapes, flags, probes, and errors that name the place."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.draft import Draft, Law
from paceline.core.interfaces import Verifier
from paceline.core.tree import TokenTree
from paceline.core.walk import TargetDistribution, Walk
from paceline.errors import ConfigError, DraftError, LossyNotAllowed, NumericsError
from paceline.verify import Coupled, Ratio, Typical
from paceline.verify.coupled import choose_tokens

VERIFIERS: list[Verifier] = [Coupled(), Coupled(whole_tree=True), Ratio(), Typical(allow_lossy=True)]
IDS = ["coupled", "coupled, whole tree", "ratio", "typical"]
SIZE = 5


def wants(*tokens: int) -> Tensor:
    """Scores whose argmax is tokens[i] at node i: [1, N, V]."""
    return torch.stack([torch.eye(SIZE)[token] * 3 for token in tokens])[None]


def verify(verifier: Verifier, draft: Draft, scores: Tensor, greedy: bool = True, position: int = 7) -> list[Walk]:
    rows = len(scores)
    target = TargetDistribution(scores, [greedy] * rows)
    return verifier.verify(draft, target, range(rows), [position] * rows)


@pytest.fixture(params=VERIFIERS, ids=IDS)
def verifier(request) -> Verifier:
    return request.param


def test_levels() -> None:
    levels = {(type(v).__name__, v.lossless, v.exact) for v in VERIFIERS}
    assert levels == {("Coupled", True, True), ("Ratio", True, False), ("Typical", False, False)}


@pytest.mark.parametrize(
    ("wanted", "path", "token", "is_bonus"),
    [
        ([2, 4, 0, 1, 0], [2], 0, True),  # node 2 stands, and is a leaf: a bonus
        ([1, 3, 0, 2, 0], [1, 3], 2, True),  # nodes 1 and 3 stand
        ([1, 4, 0, 2, 0], [1], 4, False),  # node 3 is rejected
        ([4, 3, 0, 2, 0], [], 4, False),  # token 4 is there, but as a probe
    ],
)
def test_worked_example(verifier: Verifier, wanted, path, token, is_bonus) -> None:
    tree = TokenTree.from_lists([[0, 1, 2, 3, 4]], [[-1, 0, 0, 1, 0]], probes=[[False] * 4 + [True]])
    assert verify(verifier, Draft(tree), wants(*wanted)) == [(path, token, is_bonus)]


def test_nothing_drafted(verifier: Verifier) -> None:
    walks = verify(verifier, Draft(TokenTree.chain([[0], [3]])), wants(2).repeat(2, 1, 1))
    assert walks == [([], 2, True), ([], 2, True)]


def test_ragged_batch(verifier: Verifier) -> None:
    draft = Draft(TokenTree.chain([[0, 1, 2], [0, 3], [0]]))
    scores = torch.cat([wants(1, 2, 4), wants(4, 0, 0), wants(2, 0, 0)])
    assert verify(verifier, draft, scores) == [([1, 2], 4, True), ([], 4, False), ([], 2, True)]


def test_rows_do_not_depend_on_their_neighbours(verifier: Verifier) -> None:
    draft = Draft(TokenTree.chain([[0, 1, 2], [0, 3, 3], [0, 4, 1]]))
    scores = torch.randn(3, 3, SIZE, generator=torch.Generator().manual_seed(1))
    target = TargetDistribution(scores, [False, True, False])
    together = verifier.verify(draft, target, [5, 6, 7], [3, 9, 4])
    for row in range(3):
        alone = verifier.verify(
            Draft(TokenTree.chain([draft.tree.token_ids[row].tolist()])),
            TargetDistribution(scores[row : row + 1], target.is_greedy[row : row + 1]),
            [5 + row],
            [[3, 9, 4][row]],
        )
        assert alone == [together[row]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_of_any_dtype(verifier: Verifier, dtype: torch.dtype) -> None:
    draft = Draft(TokenTree.chain([[0, 1, 2]]))
    assert verify(verifier, draft, wants(1, 2, 3).to(dtype))[0].path == [1, 2]
    assert 0 <= verify(verifier, draft, wants(1, 2, 3).to(dtype), greedy=False)[0].next_token < SIZE


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("fault", [torch.nan, -torch.inf, torch.inf])
def test_no_law_names_the_place(verifier: Verifier, fault: float, greedy: bool) -> None:
    draft = Draft(TokenTree.chain([[0, 1, 2]]))
    scores = torch.where(wants(1, 2, 3) > 0, 200.0, 0.0)  # certain in float64 as well
    scores[0, 1] = fault
    target = TargetDistribution(scores, [greedy])
    walk = verifier.verify(draft, target, [0], [7])[0]
    assert (walk.path, walk.next_token) == ([1], -1), "accepted up to the node without a distribution"
    with pytest.raises(NumericsError, match="token 8 of the answer"):
        raise target.error(0, 1, 8)


def test_one_nan_is_enough(verifier: Verifier) -> None:
    scores = wants(1, 2, 3)
    scores[0, 0, 4] = torch.nan
    assert verify(verifier, Draft(TokenTree.chain([[0, 1, 2]])), scores)[0].next_token == -1


def test_unvisited_nodes_may_hold_anything(verifier: Verifier) -> None:
    scores = wants(4, 0, 0)
    scores[0, 1:] = torch.nan
    assert verify(verifier, Draft(TokenTree.chain([[0, 1, 2]])), scores)[0].next_token == 4


def test_a_choice_depends_on_its_place_alone() -> None:
    """Not on the other nodes that are asked for; nodes of one position share their noise."""
    target = TargetDistribution(torch.randn(2, 1, SIZE).expand(2, 4, SIZE), [True, False])
    positions = torch.tensor([[1, 2, 2, 3], [4, 5, 5, 4]])
    places = [(row, node, int(positions[row, node])) for row in range(2) for node in range(4)]
    tokens = choose_tokens(target, [1, 2], places)
    for place in places:
        assert choose_tokens(target, [1, 2], [place]) == {place[:2]: tokens[place[:2]]}
    assert tokens[1, 0] == tokens[1, 3]
    assert tokens[1, 1] == tokens[1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, SIZE)}, "is not a distribution at node 0"),
        ({"q": torch.randn(1, 2, SIZE)}, "is not a distribution at node 0"),
        ({"q": torch.full((1, 2, SIZE), torch.nan)}, "is not a distribution at node 0"),
        ({"q": torch.eye(SIZE)[[4, 4]][None]}, "probability zero"),
    ],
)
def test_ratio_refuses_a_draft_without_a_law(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {"law": Law.IID, "q": torch.full((1, 2, SIZE), 1 / SIZE)} | change
    with pytest.raises(DraftError, match=message):
        verify(Ratio(), Draft(TokenTree.chain([[0, 1]]), **parts), wants(1, 2))


def test_coupled_takes_any_law() -> None:
    tree = TokenTree.chain([[0, 1]])
    plain = verify(Coupled(), Draft(tree), wants(1, 2), greedy=False)
    for law in (Law.IID, Law.WITHOUT_REPLACEMENT):
        other = verify(Coupled(), Draft(tree, law, torch.full((1, 2, SIZE), torch.nan)), wants(1, 2), greedy=False)
        assert other == plain


def test_typical_needs_consent() -> None:
    with pytest.raises(LossyNotAllowed, match=r"allow_lossy=True.*Coupled"):
        Typical()
    for options in ({"epsilon": 0.0}, {"delta": 1.0}):
        with pytest.raises(ConfigError, match=f"Typical.{next(iter(options))}"):
            Typical(**options, allow_lossy=True)


def test_typical_threshold_and_longest_path() -> None:
    """Uniform over 5 tokens: min(0.09, 0.3 / 5) = 0.06, so every token is accepted; a sharp p accepts its top only."""
    typical = Typical(allow_lossy=True)
    flat = torch.full((SIZE,), 1 / SIZE, dtype=torch.float64)
    assert typical.threshold(flat) == pytest.approx(0.06)
    assert typical.threshold(torch.eye(SIZE)[0].double()) == pytest.approx(0.09)
    tree = TokenTree.from_lists([[0, 1, 2, 3, 4]], [[-1, 0, 0, 2, 2]])
    scores = torch.zeros(1, 5, SIZE)
    scores[0, 2, 4] = 1.0  # of the two longest paths this one is likelier
    assert [walk.path for walk in verify(typical, Draft(tree), scores, greedy=False)] == [[2, 4]]


def test_typical_is_lossy() -> None:
    """The distribution tests would refuse it: with a flat target, a draft of token 1 alone always stands."""
    draft = Draft(TokenTree.chain([[0, 1]] * 50))
    target = TargetDistribution(torch.zeros(50, 2, SIZE), [False] * 50)
    walks = Typical(allow_lossy=True).verify(draft, target, range(50), [0] * 50)
    assert [walk.path for walk in walks] == [[1]] * 50
