"""Trees that grow on a GPU are those that the host grows level by level."""

import pytest
import torch

from paceline import kernels
from paceline.core.interfaces import DraftBudget
from paceline.kernels import gpu as gpu_kernels
from paceline.methods import Eagle
from paceline.methods.heads import device_trees
from tests.methods.heads import random_head, target, watched


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """For heads alone: their targets run in the native library."""
    target(torch.float32)
    monkeypatch.setattr(kernels, "kernels_for", lambda device: gpu_kernels)


def grown(version, on_device: bool, temperature: float = 0.0, **options) -> list:
    """The drafts of some rounds of a batch: tokens, parents and confidences."""
    on, found = target(torch.float32), []
    drafter = Eagle(random_head(on, version, draft_vocab=20), top_k=2, **options)

    def check(seqs, budgets, draft):
        assert (drafter._trees is not None) == on_device
        found.append((draft.tree.lists.token_ids, draft.tree.lists.parents, draft.confidence.nan_to_num()))

    bind = drafter.bind

    def bound(*given):
        bind(*given)
        drafter._trees = drafter._trees if on_device else None

    drafter.bind = bound
    watched(drafter, on, [[5, 6, 7], [9, 10]], check, rounds=1, depth=3, temperature=temperature)
    return found


def same(version, temperature: float = 0.0, **options) -> bool:
    pairs = zip(*(grown(version, place, temperature, **options) for place in (True, False)), strict=True)
    return all(a[:2] == b[:2] and torch.allclose(a[2], b[2], atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize(
    ("version", "temperature", "options"),
    [(1, 0.0, {}), (3, 0.7, {}), ("mtp", 0.0, {"tree": "chain"}), (3, 0.0, {"ngrams": False})],
    ids=str,
)
def test_trees_are_those_of_the_host(version, temperature, options):
    assert same(version, temperature, **options)


def test_a_parent_of_another_place_is_seen(monkeypatch):
    right = torch.Tensor.gather
    monkeypatch.setattr(torch.Tensor, "gather", lambda x, dim, at: right(x, dim, at.flip(1) if x.dim() == 3 else at))
    assert not same(1)


def test_nodes_that_only_the_host_knows_get_no_children():
    levels = device_trees.Levels([[[4, 5], [6, 7, 8, 9]]], [[[-0.1, -0.2], [-0.1] * 4]], [[[0, 1], [0, 2]]], 2)
    given = lambda path, tokens, logps: ([11, *tokens], [-0.05, *logps])  # noqa: E731
    tree = device_trees.DynamicTree(3, DraftBudget(2, 6), 2, rerank=given)
    levels.replay([tree])
    assert tree.tokens[:3] == [3, 11, 4]
    children = {tree.tokens[node]: tree.tokens[tree.parents[node]] for node in range(1, len(tree.tokens))}
    assert children[6] == 4
    assert all(tree.tokens[p] != 11 or t == 11 for t, p in zip(tree.tokens[1:], tree.parents[1:], strict=True))
