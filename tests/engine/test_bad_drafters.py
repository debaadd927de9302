"""Whatever a drafter hands over or raises: one `DraftError` that names it and the field, and an engine that goes on."""

from dataclasses import replace

import pytest
import torch

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.core.draft import Draft, Law
from paceline.core.interfaces import Drafter
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError, DraftError
from paceline.methods import Choose
from tests.adversaries import Constant
from tests.helpers import REPEATING, VOCAB, all_free, loaded

pytestmark = pytest.mark.usefixtures("unchecked_types")
PARAMS = SamplingParams(max_tokens=8)


class Broken(Constant):
    """Drafts rightly, until `change` says otherwise."""

    name = "broken"

    def __init__(self, change=lambda draft: draft, verb="propose"):
        super().__init__()
        self.change, self.verb = change, verb

    def propose(self, seqs, budgets):
        draft = super().propose(seqs, budgets)
        return self.change(draft) if self.verb == "propose" else draft

    def observe(self, seqs, draft, logits, walks):
        if self.verb == "observe":
            self.change(draft)


def field(**fields):
    return lambda draft: replace(draft, **fields)


CHANGES = {
    "None": (lambda draft: None, "draft.*NoneType None.*a Draft"),
    "a list": (lambda draft: [1, 2], "draft.*list"),
    "law as text": (field(law="point_mass"), "law.*str 'point_mass'.*a Law"),
    "tree None": (field(tree=None), "tree.*NoneType"),
    "two rows": (lambda draft: replace(draft, tree=TokenTree.chain([[5], [6]])), "tree.*2.*1 rows"),
    "q without law": (field(q=torch.ones(1, 4, VOCAB)), "q.*no q with POINT_MASS"),
    "law without q": (field(law=Law.IID), "q.*a q with IID"),
    "q misshapen": (field(law=Law.IID, q=torch.ones(1, 4, 3)), "q.*floating-point"),
    "q of integers": (field(law=Law.IID, q=torch.ones(1, 4, VOCAB, dtype=torch.long)), "q.*int64"),
    "q as text": (field(law=Law.IID, q="flat"), "q.*str"),
    "confidence misshapen": (field(confidence=torch.ones(1, 2)), "confidence.*floating-point"),
    "confidence as list": (field(confidence=[0.5]), "confidence.*list"),
    "hints short": (field(hints=()), "hints.*a tuple of 1 int"),
    "hints as text": (field(hints=("x",)), "hints"),
    "sources long": (field(sources=("a", "b")), "sources.*a tuple of 1 str"),
    "source None": (field(source=None), "source.*NoneType"),
}


def engine(drafter) -> LLM:
    return LLM(loaded(), drafter=drafter, policy=Fixed(3), max_num_seqs=1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_draft_names_drafter_and_field(change):
    drafter = Broken(CHANGES[change][0])
    llm = engine(drafter)
    with pytest.raises(DraftError, match=f"'broken' returned a wrong {CHANGES[change][1]}"):
        llm.generate(REPEATING, PARAMS)
    assert all_free(llm.runner)
    drafter.change = lambda draft: draft
    assert llm.generate(REPEATING, PARAMS)[0].token_ids == llm.plain().generate(REPEATING, PARAMS)[0].token_ids


@pytest.mark.parametrize("verb", ["propose", "observe"])
def test_what_a_drafter_raises_is_chained(verb):
    drafter = Broken(lambda draft: 1 / 0, verb)
    llm = engine(drafter)
    with pytest.raises(DraftError, match=rf"'broken' failed in {verb}\(\).*ZeroDivisionError: division") as told:
        llm.generate(REPEATING, PARAMS)
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert all_free(llm.runner)
    drafter.change = lambda draft: draft
    assert llm.generate(REPEATING, PARAMS)[0].token_ids == llm.plain().generate(REPEATING, PARAMS)[0].token_ids


@pytest.mark.parametrize("verb", ["propose", "observe"])
def test_a_drafter_that_writes_into_a_text_is_refused(verb):
    """Its tokens would be in the answer."""

    class Writing(Constant):
        name = "writing"

        def propose(self, seqs, budgets):
            if verb == "propose":
                seqs[0].token_ids.append(6)
            return super().propose(seqs, budgets)

        def observe(self, seqs, draft, logits, walks):
            if verb == "observe":
                seqs[0].token_ids.append(6)

    llm = engine(Writing())
    with pytest.raises(DraftError, match=rf"'writing' changed the tokens of a sequence in {verb}\(\)"):
        llm.generate(REPEATING, PARAMS)
    assert all_free(llm.runner)


def test_a_drafter_that_takes_sequences_or_budgets_away_is_refused():
    class Taking(Constant):
        name = "taking"

        def propose(self, seqs, budgets):
            draft = super().propose(seqs, budgets)
            budgets.clear()
            return draft

    with pytest.raises(DraftError, match=r"'taking' failed in propose\(\).*AttributeError"):
        engine(Taking()).generate(REPEATING, PARAMS)


def test_a_drafter_without_a_name_is_refused():
    class Nameless(Drafter):
        def propose(self, seqs, budgets):
            raise AssertionError

    with pytest.raises(ConfigError, match=r'drafter Nameless has no name\. Fix: name = "nameless" in its class'):
        engine(Nameless())


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: Choose([one, Constant()])], ids=["itself", "member"])
def test_one_drafter_for_two_engines_is_refused(wrap):
    lookup = PromptLookup()
    engine(wrap(lookup))
    with pytest.raises(ConfigError, match=r"'lookup' serves another LLM already.*one drafter for each"):
        engine(wrap(lookup))


@pytest.mark.parametrize(
    ("lists", "error"),
    [
        (([[5.0]], [[-1]]), TypeError),
        (([[[5]]], [[-1]]), TypeError),
        (([[5, 6]], [[-1]]), DraftError),
        (([[5, 6]], [[-1, 0.0]]), TypeError),
        (([[5, 6]], [[-1, 0]], "cpu", [[False]]), DraftError),
        (([[]], [[]]), DraftError),
        (([], []), DraftError),
    ],
)
def test_lists_that_are_no_tree(lists, error):
    with pytest.raises(error):
        TokenTree.from_lists(*lists)


def test_what_is_written_to_a_trees_tensors_changes_no_tree():
    def edited(draft: Draft) -> Draft:
        draft.tree.token_ids[:, 1:] = 6
        return draft

    got = engine(Broken(edited)).generate(REPEATING, PARAMS)[0]
    drafted = [one.token_ids[1:] for one in got.rounds if one.num_drafted]
    assert drafted
    assert {token for tokens in drafted for token in tokens} == {7}


def test_a_draft_that_is_right_is_taken():
    full = field(
        law=Law.IID, q=torch.full((1, 4, VOCAB), 1 / VOCAB), confidence=torch.ones(1, 4), hints=(3,), sources=("a",)
    )

    def whole(draft: Draft) -> Draft:
        return full(draft) if draft.tree.num_nodes == 4 else draft

    llm = engine(Broken(whole))
    assert llm.generate(REPEATING, PARAMS)[0].token_ids == llm.plain().generate(REPEATING, PARAMS)[0].token_ids
