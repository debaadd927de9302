"""The script that holds sampled drafts against their bounds: its rates by enumeration, and a tiny head."""

from argparse import Namespace
from itertools import chain, combinations

import pytest
import torch

from paceline import DFlash, Eagle
from tests.helpers import loaded, prompt
from tests.methods.common import new_head

SCRIPT = "sampled_bound"
P = [0.3, 0.05, 0.15, 0.1, 0.02, 0.03, 0.01, 0.14, 0.2]
Q = [0.1, 0.3, 0.1, 0.25, 0.02, 0.05, 0.08, 0.1, 0.0]  # the last token is outside
NOISE = 1 << 17


def noise(count: int) -> torch.Tensor:
    torch.manual_seed(0)
    return -torch.empty(count, len(P)).exponential_().log()


@pytest.fixture
def found(script) -> dict[str, float]:
    p, q = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    return script.rates(p, q, p.sort(descending=True).values, noise(NOISE))


def test_a_shared_draw_agrees_as_often_as_its_formula_says(found):
    same = (torch.tensor(P).log() + noise(NOISE)).argmax(-1) == (torch.tensor(Q).log() + noise(NOISE)).argmax(-1)
    assert found["shared 1"] == pytest.approx(float(same.double().mean()), abs=0.005)
    assert found["floor"] < found["shared 1"] < found["drawn 1"] < found["shared 2"] < found["shared 4"]
    assert found["shared 8"] == pytest.approx(1 - P[-1], abs=0.005)  # the whole vocabulary of the head


def test_the_bound_of_draws_is_the_least_over_all_sets(script, found):
    """Of k draws that all fall into a set H, only tokens of H can be accepted."""
    sets = [*chain.from_iterable(combinations(range(len(P)), size) for size in range(len(P) + 1))]
    for k in script.COUNTS:
        least = min(1 + sum(P[token] for token in one) - sum(Q[token] for token in one) ** k for one in sets)
        assert found[f"drawn {k}"] == pytest.approx(least)
    assert found["drawn 1"] == pytest.approx(sum(map(min, P, Q)))


def test_bounds_without_the_noise(found):
    assert [found[f"best {k}"] for k in (1, 2, 4)] == pytest.approx([0.3, 0.5, 0.79])
    assert [found[f"fixed {k}"] for k in (1, 2, 8)] == pytest.approx([P[1], P[1] + P[3], 1 - P[-1]])
    assert found["outside"] == pytest.approx(P[-1])


@pytest.mark.parametrize(("method", "kind"), [("eagle", Eagle), ("dflash", DFlash)])
def test_a_tiny_head(script, method, kind):
    head = new_head(method)
    args = Namespace(temperature=1.0, max_tokens=24, nodes=4, wider=[9], depth=3, levels=2, every=1, draws=4)
    prompts = [prompt(9, seed=seed) for seed in range(3)]
    found = script.measure(loaded(), lambda **options: kind(head, **options), prompts, args)
    passes = found["tokens_per_pass"]
    assert passes["the chain replayed"] == pytest.approx(passes["head, a chain, without counts of the text"], abs=0.15)
    assert passes["the chain replayed"] <= passes["the chain, with the tokens outside"]
    assert passes["target, the head's vocabulary, with the noise"] < passes["target, with the noise"] <= 4
    assert passes["target, 4 nodes, without the noise"] == pytest.approx(found["best_tree_expected"], rel=0.4)
    for level in found["levels"]:
        for k in script.COUNTS:
            assert level[f"fixed {k}"] <= level[f"best {k}"]
        assert level["floor"] <= level["shared 1"] <= level["drawn 1"]
    script.show(found)
