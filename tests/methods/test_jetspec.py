"""JetSpec: every drafted node has the law of the whole head behind its path, once its parents were read."""

from dataclasses import replace

import pytest
import torch

from paceline import SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.methods.dflash.drafter import DFlashPass
from paceline.methods.dflash.head import DFlashHead
from paceline.methods.dflash.jetspec import JetSpec
from paceline.target import ModelRunner
from paceline.verify import Coupled, Ratio
from tests.helpers import REPEATING, sequence
from tests.methods.heads import DTYPES, block_of, differing, random_head, states_of, target
from tests.tiny import tiny_model

WHOLE = {"passes": 9, "reads": 40}  # until every node was read


@pytest.mark.diagonal
@DTYPES
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize(("verifier", "temperature"), [(Coupled, 0.0), (Coupled, 0.6), (Ratio, 1.7)])
def test_every_node_has_the_law_of_the_whole_head(verifier, temperature, tree, dtype):
    head = random_head(target(dtype), "jetspec")
    assert not differing(JetSpec(head, tree, **WHOLE), head, temperature=temperature, verifier=verifier())


@DTYPES
@pytest.mark.parametrize("options", [{"num_hidden_layers": 1}, {"window": 3}], ids=str)
def test_every_form_of_head(options, dtype):
    head = random_head(target(dtype), "jetspec", **options)
    assert not differing(JetSpec(head, **WHOLE), head, lengths=(30, 2), pause=5 if "window" in options else 1)


class LaterRowsSeen(DFlashPass):
    """The rows of the first pass see the later ones."""

    def __init__(self, head, target):
        super().__init__(head, target)
        if self.is_native:
            block = self._block
            self._block = lambda one: block(replace(one, is_block=one.parents is None))

    def _in_torch(self, slots, ids, offsets, sees):
        return super()._in_torch(slots, ids, offsets, torch.ones_like(sees) if offsets.dim() == 1 else sees)


class BehindSiblings(DFlashPass):
    """Every mask is behind the node before it."""

    def behind(self, *given):
        level = super().behind(*given)
        return replace(level, logits=level.logits.roll(1, 1), best=None)


class AChain(DFlashPass):
    """All nodes are behind one another: each has another branch before it, and another place."""

    def behind(self, slots, tokens, parents, most):
        return super().behind(slots, tokens, torch.arange(parents.shape[1]).expand_as(parents) - 1, most)


class OnePlaceAhead(DFlashPass):
    """The nodes lie one place ahead."""

    def behind(self, slots, tokens, parents, most):
        for slot in slots:
            self.cache.lengths[slot] += 1
        level = super().behind(slots, tokens, parents, most)
        for slot in slots:
            self.cache.lengths[slot] -= 1
        return level


@DTYPES
@pytest.mark.parametrize("mutant", [LaterRowsSeen, BehindSiblings, AChain, OnePlaceAhead])
def test_mutants_of_the_passes_are_caught(mutant, dtype, monkeypatch):
    monkeypatch.setattr(JetSpec, "_pass", mutant)
    head = random_head(target(dtype), "jetspec")
    assert differing(JetSpec(head, **WHOLE), head)


def _drafted(head: DFlashHead, **options):
    """The drafter, after it drafted once behind a text, and its tree."""
    drafter, runner = JetSpec(head, ngrams=False, **options), ModelRunner(target(), 1)
    drafter.bind(runner, Coupled())
    seq = sequence(target(), list(REPEATING), SamplingParams(max_tokens=50))
    seq.slot = runner.admit(REPEATING)
    runner.extend_cache(seq.slot, REPEATING[:-1])
    draft = drafter.propose([seq], [DraftBudget(depth=9, nodes=14)])
    return drafter, draft


def test_what_was_not_read_has_the_law_of_its_level():
    """With one pass as in DFlash; with two, the children of the nodes that a first tree had know their branch."""
    head = random_head(target(), "jetspec")
    states = states_of(tiny_model("llama", torch.float64), REPEATING, head.config.states)
    count = {"level": 0, "path": 0}
    for passes in (1, 2):
        drafter, draft = _drafted(head, passes=passes, reads=3)
        tree, whole = draft.tree.rows[0], drafter.layer.head
        for node in range(2, len(tree)):
            *path, token = tree.tokens_to(node)
            column = whole.draft_ids.tolist().index(token)
            laws = {
                kind: block_of(whole, states, REPEATING, known)[len(path)].softmax(-1)[column]
                for kind, known in (("path", path), ("level", ()))
            }
            got = float(draft.confidence[0, node])
            near = [kind for kind, law in laws.items() if got == pytest.approx(float(law), rel=1e-5)]
            assert near
            assert passes == 2 or "level" in near
            if len(near) == 1:
                count[near[0]] += 1
    assert min(count.values()) > 1


def test_a_draft_is_known_by_its_passes():
    drafter, draft = _drafted(random_head(target(), "jetspec"), tree="chain")
    size = drafter.layer.head.config.block_size
    assert max(draft.tree.rows[0].depths) == size - 1
    assert drafter.source == "jetspec"
    assert drafter.seconds()["jetspec"][0] > 0


def test_two_passes_however_deep(monkeypatch):
    calls = []
    real = DFlashPass.behind
    monkeypatch.setattr(DFlashPass, "behind", lambda self, *given: calls.append(1) or real(self, *given))
    _drafted(random_head(target(), "jetspec"))
    assert calls == [1]
