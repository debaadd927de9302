"""Tokens that stand for images are never drafted, by anybody, and a draft that has one is refused."""

import pytest
import torch

from paceline import (
    Coupled,
    DraftModel,
    Eagle,
    Fixed,
    Lookahead,
    PromptLookup,
    Ratio,
    SamplingParams,
    SelfQuantized,
    Suffix,
    TokenRecycling,
)
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget
from paceline.core.tree import TokenTree
from paceline.decoding import SpeculativeDecoder, generate, loop
from paceline.decoding.contract import check_contract
from paceline.errors import DraftError
from paceline.methods import Blockwise, Medusa, Space, lookahead
from paceline.methods import lookup as prompt_lookup
from paceline.methods.heads import top_tokens as ranking
from paceline.methods.ngram_pool import NgramPool
from paceline.sampling import draft_sampler
from paceline.sampling.draft_sampler import DraftSampler
from paceline.target import ModelRunner
from tests.exactness.drafters import small_draft
from tests.helpers import VOCAB, changed, loaded, prompt, sequence
from tests.methods.heads import SOME, blockwise, medusa
from tests.methods.space.common import adapter
from tests.methods.test_eagle import random_head

MOST = frozenset(range(0, VOCAB, 2))  # every other token: whoever forgets, drafts one at once
PARAMS = [SamplingParams(temperature=t, max_tokens=10) for t in (0.0, 1.0)]
LOOPING = [5, 9, 8, 31, 5, 9, 8, 31, 5]


class Sees(ModelRunner):
    """A target whose vocabulary is half placeholders."""

    banned_token_ids = MOST


def drafters():
    target = loaded()
    heads = {f"eagle {version}": Eagle(random_head(target, version), top_k=4) for version in (1, 3)}
    return {
        "draft model": DraftModel(small_draft()),
        "self-int4": SelfQuantized(lm_head="shared"),
        "lookup": PromptLookup(),
        "suffix": Suffix(),
        "recycling": TokenRecycling(),
        "lookahead": Lookahead(ngram=2),
        "space": Space(adapter(), top_k=3),
        "space, corrected": Space(adapter(transition_rank=4), top_k=3),
        "medusa": Medusa(medusa(target), top_k=4),
        "medusa, some tokens": Medusa(medusa(target, ids=SOME + 0), top_k=4),
        "blockwise": Blockwise(blockwise(target)),
        "mtp": Eagle(random_head(target, "mtp", draft_vocab=target.vocab_size)),
        **heads,
    }


def drafted_tokens(drafter, verifier=None) -> set[int]:
    """All candidates of a few rounds, by a loop that refuses none."""
    seen = set[int]()

    def noted(draft, *rest, banned_token_ids=()):
        tree = draft.tree
        seen.update(tree.token_ids[:, 1:][~tree.is_probe[:, 1:]].tolist())

    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "check_contract", lambda draft, *rest: noted(draft))
    try:
        decoder = SpeculativeDecoder(Sees(loaded(), 2), drafter, verifier or Coupled(), Fixed(4, 12))
        for _ in generate(decoder, [sequence(loaded(), LOOPING + prompt(4, 1) + LOOPING, p) for p in PARAMS]):
            pass
    finally:
        patch.undo()
    return seen


@pytest.mark.parametrize("name", drafters())
def test_nobody_drafts_a_placeholder(name):
    seen = drafted_tokens(drafters()[name])
    assert not seen & MOST
    if name != "medusa, some tokens":  # its vocabulary is all placeholders
        assert seen


@pytest.mark.parametrize("name", ["draft model", "self-int4"])
def test_nor_where_tokens_are_drawn(name):
    assert not drafted_tokens(drafters()[name], Ratio()) & MOST


def unmasked(scores, columns):
    return scores


@pytest.mark.parametrize(
    "name",
    [name for name in drafters() if name not in ("lookup", "suffix", "lookahead", "recycling", "medusa, some tokens")],
)
def test_without_the_bar_they_would(monkeypatch, name):
    monkeypatch.setattr(draft_sampler, "mask_banned", unmasked)
    monkeypatch.setattr(ranking, "mask_banned", unmasked)
    assert drafted_tokens(drafters()[name]) & MOST


def test_lookup_without_the_stop_would(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "before_banned", lambda tokens, banned_token_ids: tokens)
    assert drafted_tokens(PromptLookup()) & MOST


def test_lookahead_with_a_pool_that_takes_all_would(monkeypatch):
    monkeypatch.setattr(lookahead, "NgramPool", lambda *sizes: NgramPool(*sizes[:3]))
    assert drafted_tokens(Lookahead(ngram=2)) & MOST


def test_lookup_has_nothing_to_propose_before_a_placeholder():
    lookup = PromptLookup()
    lookup.bind(Sees(loaded(), 1), Coupled())
    seq = sequence(loaded(), [5, 8, 7, 5], PARAMS[0], slot=0)
    assert lookup.draft_options(seq)[0].hint == -1


def test_q_leaves_them_out():
    seq = sequence(loaded(), [5, 7], PARAMS[1])
    tokens, q = DraftSampler(False, frozenset({3, 200})).sample(
        torch.full((1, VOCAB), 0.0).index_fill(1, torch.tensor(3), 9.0), [seq], [0]
    )
    assert q is not None
    assert q[0, 3] == 0
    assert q.sum() == pytest.approx(1, abs=1e-5)
    assert int(tokens[0]) != 3


def test_the_loop_refuses_them_by_name():
    seq = sequence(loaded(), [5, 7], PARAMS[0])
    draft = Draft(TokenTree.chain([[7, 9, 4]]), source="careless")
    budgets = [DraftBudget(4, 4)]
    check_contract(draft, [seq], budgets, VOCAB)
    with pytest.raises(DraftError, match="careless drafted a placeholder of an image"):
        check_contract(draft, [seq], budgets, VOCAB, 0, frozenset({4}))
    probe = changed(draft.tree, is_probe=[[False, False, True]])
    check_contract(Draft(probe), [seq], budgets, VOCAB, 0, frozenset({4}))  # a probe is never kept
