"""The distribution of one emitted token, in fractions: equal to p for the rules, different for every mutant."""

import numpy as np
import pytest
import torch
from enumeration import as_weights, distance
from mutants import MUTANTS, RULES, Rule
from toy_distributions import pairs

from paceline.errors import DraftError
from paceline.verify.rejection import acceptance, point_mass, residual, without, without_replacement

pytestmark = pytest.mark.usefixtures("unchecked_types")  # thousands of enumerated programs
PAIRS = list(pairs(200))


def total_variations(rule: Rule, count: int, cases: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    found = []
    for p, q in cases:
        size = count if len(p) <= 5 else min(count, 2)  # the disjoint pairs are twice as long
        found.append(distance(rule.output(p, q, size), as_weights(p)))
    return found


@pytest.mark.parametrize("name", RULES)
def test_rule_reproduces_p_exactly(name: str) -> None:
    assert set(total_variations(*RULES[name], PAIRS)) == {0}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    found = total_variations(*MUTANTS[name], PAIRS[:60])
    assert sum(found) / len(found) > 0.01


def test_pairs_hold_every_special_case() -> None:
    assert len(PAIRS) == 200
    assert any((p == q).all() for p, q in PAIRS)
    assert any((p * q).sum() == 0 for p, q in PAIRS)
    assert any(p.max() == 1 for p, _ in PAIRS)
    assert any(q.max() == 1 for _, q in PAIRS)


def test_acceptance_is_the_overlap() -> None:
    """Sum over x of q(x) min(1, p(x)/q(x)) = sum of min(p, q); for a uniform draft, sum of min(p, 1/V)."""
    for p, q in PAIRS:
        drawn = [token for token in range(len(q)) if q[token] > 0]
        assert sum(q[token] * acceptance(p, q, token) for token in drawn) == np.minimum(p, q).sum()


def test_draft_equal_to_target_always_stands() -> None:
    for p, _ in PAIRS:
        assert all(acceptance(p, p, token) == 1 for token in range(len(p)) if p[token] > 0)


def test_same_functions_on_tensors() -> None:
    for p, q in PAIRS:
        p64, q64 = (torch.tensor(v.astype(float)) for v in (p, q))
        torch.testing.assert_close(residual(p64, q64), torch.tensor(residual(p, q).astype(float)), atol=1e-12, rtol=0)
        torch.testing.assert_close(without(p64, 1), torch.tensor(without(p, 1).astype(float)), atol=1e-12, rtol=0)
        for token in range(len(q)):
            if q[token] > 0:
                assert acceptance(p64, q64, token) == pytest.approx(float(acceptance(p, q, token)), abs=1e-12)


def test_laws_leave_their_arguments_alone() -> None:
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.25, 0.75], dtype=torch.float64)
    residual(p, q), without(p, 0)
    assert p.tolist() == [0.5, 0.5]
    assert q.tolist() == [0.25, 0.75]


def test_nothing_owed_gives_p() -> None:
    p = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert residual(p, p).tolist() == [0.0, 1.0]
    assert without(p, 1).tolist() == [0.0, 1.0]


def test_token_outside_q_is_refused() -> None:
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    with pytest.raises(DraftError, match="probability zero"):
        acceptance(p, q, 0)


def test_repeated_sibling() -> None:
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    with pytest.raises(DraftError, match="not distinct"):
        without_replacement(p, q, [1, 1], lambda _: False)
    asked: list[float] = []
    index, owed = point_mass(p, [0, 0], lambda probability: bool(asked.append(float(probability))))
    assert (index, owed.tolist(), asked) == (None, [0.0, 1.0], [0.5, 0.0])
