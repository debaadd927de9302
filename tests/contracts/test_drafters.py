"""What every drafter keeps to: no draft without a budget, nothing of a slot's last tenant, no placeholder of an image.

That it changes no answer, whoever shares the batch, is in `tests/exactness`; that the loop refuses what breaks the
contract, in `tests/engine/test_bad_drafters.py`.
"""

from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch

from paceline import Coupled, DraftModel, Fixed, Lookahead, PromptLookup, Ratio, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget, Drafter
from paceline.core.tree import TokenTree
from paceline.engine import loop
from paceline.engine.contract import check_contract
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import DraftError
from paceline.methods import lookahead
from paceline.methods import lookup as prompt_lookup
from paceline.methods.heads import top_tokens as ranking
from paceline.methods.ngram_pool import NgramPool
from paceline.sampling import draft_sampler
from paceline.sampling.draft_sampler import DraftSampler
from paceline.target import ModelRunner
from tests.exactness.drafters import DRAFTERS, twin
from tests.helpers import REPEATING, VOCAB, admit, changed, generate, loaded, oracle, prompt, reading_apart, sequence

LEARNT = (
    *("recycling", "ouroboros", "ouroboros, same weights", "random trees", "trees of endings"),
    *("random trees, sometimes", "random trees + draft model"),
)
"""What they draft depends on the rounds of others, by design."""
PARAMS = SamplingParams(temperature=1.0, max_tokens=30)
FIRST, SECOND = [*REPEATING, *REPEATING], [*prompt(20), *REPEATING]


def future() -> dict[tuple[int, ...], list[int]]:
    return {tuple(ids): oracle(loaded(), ids, PARAMS).token_ids for ids in (FIRST, SECOND)}


def drafts_of(drafter: Drafter, texts: Sequence[list[int]], rounds: int = 6) -> list[tuple[object, ...]]:
    """The drafts for the last text, in the slot where the others were, each of which was left in the middle."""
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(loaded(), 2)), drafter, Coupled(), Fixed(4, 16))
    drafter.release([0, 1])  # unknown slots are harmless
    drafts = list[tuple[object, ...]]()
    for ids in texts:
        seq = sequence(loaded(), ids, PARAMS)
        admit(decoder, seq)
        for _ in range(rounds):
            decoder.step([seq])
        drafts = [(record.token_ids, record.parents, record.num_rows) for record in seq.rounds]
        decoder.release(seq)
        decoder.release(seq)  # twice is harmless
    return drafts


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in LEARNT])
def test_nothing_of_a_slot_outlives_its_tenant(name):
    fresh, used = (drafts_of(DRAFTERS[name](loaded(), future()), texts) for texts in ([FIRST], [SECOND, FIRST]))
    assert used == fresh


class Keeps(PromptLookup):
    """Mutant: the index of the slot stays."""

    def release(self, slots): ...


class KeepsCache(DraftModel):
    """Mutant: the draft's cache of the slot stays."""

    def release(self, slots): ...


@pytest.mark.parametrize("mutant", [Keeps, lambda: KeepsCache(twin(loaded()))])
def test_what_outlives_it_is_noticed(mutant):
    with suppress(DraftError, IndexError):  # or it breaks down
        assert drafts_of(mutant(), [SECOND, FIRST]) != drafts_of(mutant(), [FIRST])


@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_is_drafted_without_a_budget(name):
    drafter = DRAFTERS[name](loaded(), future())
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(loaded(), 1)), drafter, Coupled(), Fixed(4, 16))
    seq = sequence(loaded(), FIRST, PARAMS)
    admit(decoder, seq)
    for _ in range(3):
        decoder.step([seq])
        before = list(seq.token_ids)
        with torch.inference_mode():
            tree = drafter.propose([seq], [DraftBudget(0, 0)]).tree
        assert bool(tree.is_probe[:, 1:].all())
        assert seq.token_ids == before


# Placeholders of images

MOST = frozenset(range(0, VOCAB, 2))  # every other token: whoever forgets, drafts one at once
LOOPING = [5, 9, 8, 31, 5, 9, 8, 31, 5]


class Sees(ModelRunner):
    """A target whose vocabulary is half placeholders."""

    banned_token_ids = MOST


def drafted_tokens(drafter: Drafter, verifier=None) -> set[int]:
    """All candidates of a few rounds, by a loop that refuses none."""
    seen = set[int]()

    def noted(draft: Draft, *rest) -> None:
        tree = draft.tree
        seen.update(tree.token_ids[:, 1:][~tree.is_probe[:, 1:]].tolist())

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(loop, "check_contract", noted)
        decoder = SpeculativeDecoder(Sees(loaded(), 2), drafter, verifier or Coupled(), Fixed(4, 12))
        asked = [SamplingParams(temperature=t, max_tokens=10) for t in (0.0, 1.0)]
        for _ in generate(decoder, [sequence(loaded(), LOOPING + prompt(4, 1) + LOOPING, one) for one in asked]):
            pass
    return seen


OWN = [name for name in list(DRAFTERS)[1 : list(DRAFTERS).index("random trees")] if "random trees" not in name]
"""Not plain decoding, nor adversaries."""
COPIES = "lookup recent", "lookup first", "suffix", "suffix, answers", "jump-forward", "lookahead", "recycling"


def made(name: str) -> Drafter:
    return Lookahead(ngram=2) if name == "lookahead" else DRAFTERS[name](loaded(), future())


@pytest.mark.parametrize("name", OWN)
def test_nobody_drafts_a_placeholder(name):
    seen = drafted_tokens(made(name))
    assert not seen & MOST
    assert seen or name in ("jump-forward", "medusa, own heads")  # their vocabulary is all placeholders


@pytest.mark.parametrize("name", ["draft model", "self int4"])
def test_nor_where_tokens_are_drawn(name):
    assert not drafted_tokens(made(name), Ratio()) & MOST


@pytest.mark.parametrize("name", [name for name in OWN if name not in (*COPIES, "medusa, own heads")])
def test_without_the_bar_they_would(monkeypatch, name):
    for module in (draft_sampler, ranking):
        monkeypatch.setattr(module, "mask_banned", lambda scores, columns: scores)
    assert drafted_tokens(made(name)) & MOST


def test_lookup_without_the_stop_would(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "before_banned", lambda tokens, banned_token_ids: tokens)
    assert drafted_tokens(PromptLookup()) & MOST


def test_lookahead_with_a_pool_that_takes_all_would(monkeypatch):
    monkeypatch.setattr(lookahead, "NgramPool", lambda *sizes: NgramPool(*sizes[:3]))
    assert drafted_tokens(Lookahead(ngram=2)) & MOST


def test_lookup_has_nothing_to_propose_before_a_placeholder():
    lookup = PromptLookup()
    lookup.bind(Sees(loaded(), 1), Coupled())
    assert lookup.draft_options(sequence(loaded(), [5, 8, 7, 5], PARAMS, slot=0))[0].hint == -1


def test_q_leaves_them_out():
    seq, scores = sequence(loaded(), [5, 7], PARAMS), torch.zeros(1, VOCAB).index_fill(1, torch.tensor(3), 9.0)
    tokens, q = DraftSampler(False, frozenset({3, 200})).sample(scores, [seq], [0])
    assert q is not None
    assert q[0, 3] == 0
    assert q.sum() == pytest.approx(1, abs=1e-5)
    assert int(tokens[0]) != 3


def test_the_loop_refuses_them_by_name():
    seq, budgets = sequence(loaded(), [5, 7], PARAMS), [DraftBudget(4, 4)]
    draft = Draft(TokenTree.chain([[7, 9, 4]]), source="careless")
    check_contract(draft, [seq], budgets, VOCAB)
    with pytest.raises(DraftError, match="careless drafted a placeholder of an image"):
        check_contract(draft, [seq], budgets, VOCAB, 0, frozenset({4}))
    probe = changed(draft.tree, is_probe=[[False, False, True]])
    check_contract(Draft(probe), [seq], budgets, VOCAB, 0, frozenset({4}))  # a probe is never kept
