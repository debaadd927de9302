"""The distribution of a draft that is restricted to the tokens both vocabularies have: exact fractions."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from enumeration import as_weights, exact, output_distribution
from toy_distributions import random_distribution

from paceline.methods.draft_model.chain import CommonTokens
from paceline.verify.rejection import iid

SIZE = 5


def cases(count: int = 60):
    """P over the target's tokens, the draft's distribution over its own, and the draft's id by the target's."""
    rng = random.Random(3)
    for _ in range(count):
        draft = exact([rng.randint(1, 6) for _ in range(6)])
        ours, theirs = rng.sample(range(SIZE), 3), rng.sample(range(6), 3)
        yield random_distribution(rng, SIZE), draft, dict(zip(ours, theirs, strict=True))


def restricted(draft, common) -> list[Fraction]:
    """The draft's distribution on the common tokens, by the target's ids."""
    mass = sum(draft[index] for index in common.values())
    return [draft[common[token]] / mass if token in common else Fraction(0) for token in range(SIZE)]


def law_of(p, drawn, claimed) -> dict:
    """The distribution of the token that is emitted where one is drawn from `drawn` and judged by `claimed`."""

    def program(chance):
        token = chance.draw(drawn)
        index, owed = iid(p, claimed, [token], chance.coin)
        return token if index is not None else chance.draw(owed)

    return output_distribution(program)


def test_spread_logits_are_the_restricted_law():
    for _, draft, common in cases():
        logits = torch.tensor([[float(mass) for mass in draft]], dtype=torch.float64).log()
        q = CommonTokens(common, torch.device("cpu")).spread(logits, SIZE).softmax(-1)[0]
        assert torch.allclose(q, torch.tensor([float(mass) for mass in restricted(draft, common)], dtype=q.dtype))


def test_the_output_has_the_target_s_law():
    for p, draft, common in cases():
        q = exact(restricted(draft, common))
        assert law_of(p, q, q) == as_weights(p)


MUTANTS = {
    "not renormalised": lambda draft, common: [
        draft[common[token]] if token in common else Fraction(0) for token in range(SIZE)
    ],
    "by the draft's ids": lambda draft, common: list(draft[:SIZE]),
    "of other columns": lambda draft, common: restricted(
        draft, dict(zip(common, [*common.values()][::-1], strict=True))
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_have_another_law(mutant):
    wrong = 0
    for p, draft, common in cases():
        q, claimed = restricted(draft, common), MUTANTS[mutant](draft, common)
        if all(claimed[token] > 0 for token in range(SIZE) if q[token] > 0):
            wrong += law_of(p, exact(q), np.array(claimed, dtype=object)) != as_weights(p)
    assert wrong
