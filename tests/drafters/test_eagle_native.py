"""Faults of native passes that the tests of EAGLE must see."""

import pytest
import torch

from paceline.core.interfaces import DraftBudget
from paceline.drafters import Eagle
from paceline.drafters.eagle_pass import EaglePass
from tests.drafters import test_eagle
from tests.drafters.heads import random_head


class UnderOthers(EaglePass):
    """Nodes hang under the first of the level before."""

    def step(self, tokens, hidden, parents, most=0):
        level = super().step(tokens, hidden, parents, most)
        self._parents[:, self._newest :] = max(self._newest - 1, -1)
        return level


class ForgetsLevels(EaglePass):
    """Every level lies where the first one lay."""

    def step(self, tokens, hidden, parents, most=0):
        self._parents = self._parents[:, :0]
        return super().step(tokens, hidden, parents, most)


class PairsUnread(EaglePass):
    """Only the last pair is digested."""

    def extend_cache(self, slots, tokens, states, *rest):
        return super().extend_cache(slots, [row[-1:] for row in tokens], [known[-1:] for known in states], *rest)


def test_all_of_a_tree_is_right():
    head = random_head(test_eagle.target(torch.float32), 3)
    assert test_eagle.is_right(Eagle(head, top_k=3), head, budget=DraftBudget(4, 39), rounds=2)


@pytest.mark.parametrize("mutant", [UnderOthers, ForgetsLevels, PairsUnread])
def test_mutants_of_native_passes_are_caught(mutant, monkeypatch):
    monkeypatch.setattr("paceline.drafters.eagle.EaglePass", mutant)
    head = random_head(test_eagle.target(torch.float32), 3)
    assert not test_eagle.is_right(Eagle(head, top_k=3), head, budget=DraftBudget(4, 39), rounds=2)
