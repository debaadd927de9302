"""DFlash: every drafted node has the law of the whole head, which `head.block_of` writes out; mutants have others."""

from dataclasses import replace

import pytest
import torch

from paceline import SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError
from paceline.kernels import load
from paceline.methods import Eagle
from paceline.methods.dflash.drafter import DFlash, DFlashPass
from paceline.target import ModelRunner
from paceline.verify import Coupled, Ratio
from tests.helpers import REPEATING, sequence
from tests.methods.heads import DTYPES, differing, random_head, target


@pytest.mark.diagonal
@DTYPES
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize(("verifier", "temperature"), [(Coupled, 0.0), (Coupled, 0.6), (Ratio, 1.7)])
def test_every_node_has_the_law_of_the_whole_head(verifier, temperature, tree, dtype):
    head = random_head(target(dtype), "dflash")
    assert not differing(DFlash(head, tree), head, temperature=temperature, verifier=verifier())


FORMS = {
    "one layer": {"num_hidden_layers": 1},
    "Llama's layers": {"qk_norm": False, "attention_bias": True},
    "scaled": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "a window": {"window": 3},
}


@DTYPES
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_every_form_of_head(options, dtype, monkeypatch):
    monkeypatch.setattr("paceline.methods.dflash.drafter.CHUNK", 8)  # so that a prompt is read in parts
    head = random_head(target(dtype), "dflash", **options)
    assert not differing(DFlash(head), head, lengths=(30, 2), pause=5 if "window" in options else 1)


class StatesShifted(DFlashPass):
    """Every state is in the place of the next."""

    def extend_cache(self, slots, tokens, states, *rest):
        return super().extend_cache(slots, tokens, [one.roll(1, 0) for one in states], *rest)


class NewestUnread(DFlashPass):
    """The newest state is not read."""

    def extend_cache(self, slots, tokens, states, *rest):
        known = [torch.cat([one[:-1], torch.zeros_like(one[-1:])]) for one in states]
        return super().extend_cache(slots, tokens, known, *rest)


class AnotherAnchor(DFlashPass):
    """The block begins with the token before."""

    def extend_cache(self, slots, tokens, states, *rest):
        return super().extend_cache(slots, [row[-2:-1] or row for row in tokens], states, *rest)


class RowsShifted(DFlashPass):
    """Every row of a block drafts the token of the next."""

    def extend_cache(self, *given, **masks):
        level = super().extend_cache(*given, **masks)
        return type(level)(level.hidden, level.logits.roll(1, 1))


@DTYPES
@pytest.mark.parametrize("mutant", [StatesShifted, NewestUnread, AnotherAnchor, RowsShifted])
def test_mutants_of_the_pass_are_caught(mutant, dtype, monkeypatch):
    monkeypatch.setattr(DFlash, "_pass", mutant)
    head = random_head(target(dtype), "dflash")
    assert differing(DFlash(head), head)


class LayersThrough(DFlashPass):
    """The context goes through the layers, as a text does."""

    def __init__(self, *given):
        super().__init__(*given)
        self._context._context = None


class CausalBlock(DFlashPass):
    """A row of a block sees the rows before it only."""

    def __init__(self, *given):
        super().__init__(*given)
        block = self._block
        self._block = lambda one: block(replace(one, is_block=False))


@pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")
@pytest.mark.parametrize("mutant", [LayersThrough, CausalBlock])
def test_mutants_of_native_passes_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(DFlash, "_pass", mutant)
    head = random_head(target(torch.float32), "dflash")
    assert differing(DFlash(head), head)


def test_a_tree_is_no_deeper_than_the_block():
    head = random_head(target(), "dflash")
    drafter, runner = DFlash(head, "chain"), ModelRunner(target(), 1)
    drafter.bind(runner, Coupled())
    seq = sequence(target(), list(REPEATING), SamplingParams(max_tokens=50))
    seq.slot = runner.admit(REPEATING)
    runner.extend_cache(seq.slot, REPEATING[:-1])
    tree = drafter.propose([seq], [DraftBudget(depth=9, nodes=30)]).tree
    assert max(len(tree.rows[0].path_to(node)) for node in range(tree.num_nodes)) == head.config.block_size - 1
    assert drafter.seconds()["dflash"][0] > 0
    assert drafter.draft_options(seq)[0].steps(4) == 1


@pytest.mark.parametrize(("drafter", "version"), [(Eagle, "dflash"), (DFlash, 3)])
def test_heads_of_other_methods_are_refused(drafter, version):
    with pytest.raises(ConfigError, match="another method"):
        drafter(random_head(target(), version)).bind(ModelRunner(target(), 1), Coupled())
