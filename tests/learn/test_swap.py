"""Heads that change while requests run: answers stay, drafts are those of a fresh drafter, worse heads go."""

import gc
import weakref

import pytest
import torch

from paceline.core.interfaces import DraftBudget
from paceline.errors import ConfigError, IncompatibleModels
from paceline.learn.drafter import Learned
from paceline.learn.folder import LearnFolder
from paceline.methods.eagle.drafter import Eagle
from paceline.methods.heads.folder import save_head
from paceline.methods.jump_forward import JumpForwardSpec
from tests.adversaries import Constant, Scripted
from tests.helpers import admit, loaded, prompt, sequence
from tests.learn.helpers import GREEDY, PROMPTS, SAMPLED, answers, head_spec, learning_llm, until
from tests.methods.common import new_head, saved


def offer(llm, drafter) -> None:
    """Let the drafter that learns take this one, of a new head, at the end of the round."""
    drafter.bind(llm.runner, llm.verifier)
    learned = llm.decoder.drafter
    place = learned._folder.next_head()
    learned.learner._known.add(place)
    save_head(place, new_head("eagle", seed=5), loaded(), {})
    learned.learner.offered = place, drafter


@pytest.fixture
def llm(tmp_path):
    """It learns, and begins with a random head."""
    made = learning_llm(tmp_path / "learn", head_spec(saved(tmp_path / "head", "eagle")))
    yield made
    made.decoder.drafter.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same_before_during_and_after(llm, params):
    expected = answers(llm.plain(), params, PROMPTS[:6])
    learned = llm.decoder.drafter
    assert answers(llm, params, PROMPTS[:6]) == expected
    offer(llm, Eagle(new_head("eagle", seed=5)))
    assert answers(llm, params, PROMPTS[:6]) == expected
    assert len(learned._heads) == 1
    assert learned.swaps + learned.rollbacks == 1
    assert answers(llm, params, PROMPTS[:6]) == expected


def drafts_as_a_fresh_one(llm, seed: int) -> bool:
    """Whether a sequence is drafted for after a swap as by a drafter that never knew another head."""
    learned, seq = llm.decoder.drafter, sequence(loaded(), prompt(9), GREEDY)
    admit(llm.decoder, seq)
    for _ in range(4):
        llm.decoder.step([seq])
    offer(llm, Eagle(new_head("eagle", seed)))
    llm.decoder.step([seq])  # takes it
    learned._heads = learned._heads[1:]
    alone = Eagle(new_head("eagle", seed))
    alone.bind(llm.runner, llm.verifier)
    ours, theirs = (drafter.propose([seq], [DraftBudget(4, 12)]) for drafter in (learned, alone))
    llm.decoder.release(seq)
    return ours.tree.rows == theirs.tree.rows and torch.equal(*(d.confidence.nan_to_num() for d in (ours, theirs)))


def test_no_cache_outlives_a_swap(llm, monkeypatch):
    assert drafts_as_a_fresh_one(llm, seed=5)
    swap = Learned._swap

    def with_the_old_cache(self):
        swap(self)
        self._heads[-1].drafter.layer.cache = self._heads[0].drafter.layer.cache

    monkeypatch.setattr(Learned, "_swap", with_the_old_cache)
    assert not drafts_as_a_fresh_one(llm, seed=6)


@pytest.mark.parametrize("is_better", [True, False])
def test_the_better_head_stays(llm, is_better):
    """Both draft for requests in turn; the one whose tokens are accepted stays, in the folder as well."""
    learned = llm.decoder.drafter
    future = {tuple(ids): ids + said for ids, said in zip(PROMPTS, answers(llm.plain()), strict=True)}
    good, bad = Scripted(future, [2]), Constant(0)
    old, new = (bad, good) if is_better else (good, bad)
    first = weakref.ref(learned._heads[0].drafter)
    old.bind(llm.runner, llm.verifier)
    learned._heads[0].drafter = old
    offer(llm, new)
    answers(llm)
    assert (learned.swaps, learned.rollbacks) == ((1, 0) if is_better else (0, 1))
    assert learned._heads[0].drafter is (new if is_better else old)
    gc.collect()
    assert first() is None, "its weights and caches are gone"
    assert learned.metrics()["learn_head"][1] == (1 if is_better else 0)
    until(lambda: [head.name for head in learned._folder.heads()] == ["000001" if is_better else "000000"])


def test_a_restart_goes_on_from_the_best_head(tmp_path):
    spec = head_spec(saved(tmp_path / "head", "eagle"))
    first = learning_llm(tmp_path / "learn", spec)
    folder = LearnFolder(tmp_path / "learn")
    first.decoder.drafter.close()
    save_head(folder.next_head(), new_head("eagle", seed=5), loaded(), {})
    folder.keep(folder.heads()[1])
    again = learning_llm(tmp_path / "learn", spec)
    (head,) = again.decoder.drafter._heads
    again.decoder.drafter.close()
    assert head.folder.name == "000001"


def test_a_refused_target_leaves_no_folder(tmp_path):
    with pytest.raises(IncompatibleModels, match="more than output rows times states"):
        learning_llm(tmp_path / "learn", target=loaded("granite"))
    assert not (tmp_path / "learn").exists()


def test_what_does_not_learn_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="this drafter does not learn"):
        Learned(JumpForwardSpec(), tmp_path)
