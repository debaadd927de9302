"""DSpark: every drafted node has the law of the whole head after its own path; `heads.told` writes it out."""

import pytest
import torch

from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.dflash.drafter import DFlash
from paceline.methods.dflash.jetspec import JetSpec
from paceline.methods.dspark.drafter import DSpark
from paceline.methods.dspark.head import DSparkHead, MarkovHead
from paceline.target import ModelRunner
from paceline.verify import Coupled, Ratio
from tests.methods.heads import DTYPES, attached, differing, random_head, target

FORMS = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "tables": {"own_tables": True},
    "vanilla, tables": {"markov_head_type": "vanilla", "own_tables": True},
    "a window": {"window": 3},
    "after the first row": {"tells_first": False},
    "from the anchor": {"from_anchor": True},
}


@pytest.mark.diagonal
@DTYPES
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize(("verifier", "temperature"), [(Coupled, 0.0), (Coupled, 0.6), (Ratio, 1.7)])
def test_every_node_has_the_law_of_the_whole_head(verifier, temperature, tree, dtype):
    head = random_head(target(dtype), "dspark")
    assert not differing(DSpark(head, tree), head, temperature=temperature, verifier=verifier())


@DTYPES
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_every_form_of_head(options, dtype):
    head = random_head(target(dtype), "dspark", **options)
    assert not differing(DSpark(head), head, lengths=(30, 2), pause=5 if "window" in options else 1)


def test_a_folded_head_is_the_same():
    head = attached(random_head(target(), "dspark"), target())
    folded, tokens, hidden = head.folded(), torch.arange(20), torch.randn(20, 32, dtype=torch.float64)
    assert folded.config.own_tables
    assert folded.folded() is folded
    torch.testing.assert_close(folded.before(tokens), head.before(tokens))
    z = head.before(tokens)
    plain = head.logits(hidden + head.markov_head.markov_w2(z))
    torch.testing.assert_close(folded.logits(hidden) + folded.markov_head.markov_w2(z), plain)


def _of_the_next_token(self, tokens, real=DSparkHead.before):
    return real(self, (tokens + 1) % self.config.vocab_size)


def _of_one_for_all(self, tokens, real=DSparkHead.before):
    return real(self, tokens[:1].expand(tokens.shape))


def _without_state(self, before, hidden, state, real=MarkovHead.forward):
    return real(self, before, hidden, torch.zeros_like(state))


def _of_another_state(self, before, hidden, state, real=MarkovHead.forward):
    return real(self, before, hidden, state.roll(1, 0))


def _of_another_row(self, before, hidden, state, real=MarkovHead.forward):
    return real(self, before, hidden.roll(1, -1), state)


def _unbiased(self, before, hidden, state, real=MarkovHead.forward):
    return torch.zeros_like(before), real(self, before, hidden, state)[1]


MUTANTS = {
    (DSparkHead, "before"): [_of_the_next_token, _of_one_for_all],
    (MarkovHead, "forward"): [_without_state, _of_another_state, _of_another_row, _unbiased],
}


@DTYPES
@pytest.mark.parametrize(("place", "mutant"), [(place, one) for place, all_ in MUTANTS.items() for one in all_])
def test_mutants_are_caught(place, mutant, dtype, monkeypatch):
    monkeypatch.setattr(*place, mutant)
    head = random_head(target(dtype), "dspark")
    assert differing(DSpark(head), head)


@pytest.mark.parametrize(("drafter", "version"), [
    (DFlash, "dspark"), (DSpark, "dflash"), (DFlash, "jetspec"), (JetSpec, "dflash"), (JetSpec, "dspark"),
])  # fmt: skip
def test_heads_of_other_methods_are_refused(drafter, version):
    with pytest.raises(ConfigError, match="another method"):
        drafter(random_head(target(), version)).bind(ModelRunner(target(), 1), Coupled())


def test_a_head_of_another_target_is_refused():
    head = random_head(target(), "dspark", states=(1, 3))
    with pytest.raises(IncompatibleModels, match="another target"):
        DSpark(head).bind(ModelRunner(target(), 1), Coupled())
