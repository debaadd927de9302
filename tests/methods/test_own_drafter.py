"""A drafter of one's own takes no edit of the package: an instance for `LLM`, an entry point for a name."""

import json
from importlib.metadata import EntryPoint
from typing import Annotated, ClassVar

import pytest
from pydantic import Field

from paceline import LLM, PromptLookup, SamplingParams, methods
from paceline.config import engine_flags, parse
from paceline.core.draft import Draft
from paceline.core.interfaces import Drafter, DrafterInfo, DraftOptions
from paceline.core.tree import TokenTree
from paceline.errors import ConfigError
from paceline.measure.tune import candidates_of
from paceline.methods import DrafterSpec
from paceline.methods import table as registry
from paceline.methods.heads.exchange import ENGINES
from paceline.methods.method import named
from paceline.methods.spec import spec_class
from paceline.schema import checked
from tests.cli.helpers import answer
from tests.helpers import loaded


class Bigrams(Drafter):
    """Draft the token that followed the last one most recently, and so on."""

    name: ClassVar[str] = "bigrams"
    info = DrafterInfo(drafts_during_prefill=True)  # it reads neither states nor cache

    def __init__(self, longest: int = 4):
        self.longest = longest
        self._followers: dict[int, dict[int, int]] = {}  # by slot

    def bind(self, target, verifier):
        self._banned = target.banned_token_ids

    def draft_options(self, seq):
        return (DraftOptions(self.name, hint=0 if seq.token_ids[-1] in self._followers.get(seq.slot, {}) else -1),)

    def propose(self, seqs, budgets):
        rows = []
        for seq, budget in zip(seqs, budgets, strict=True):
            followers = self._followers.setdefault(seq.slot, {})
            followers.update(zip(seq.token_ids, seq.token_ids[1:], strict=False))
            row = [seq.token_ids[-1]]
            while len(row) <= min(budget.depth, self.longest) and row[-1] in followers:
                if (token := followers[row[-1]]) in self._banned:
                    break
                row.append(token)
            rows.append(row)
        return Draft(TokenTree.chain(rows), source=self.name)

    def release(self, slots):
        for slot in slots:
            self._followers.pop(slot, None)


@checked
class BigramsSpec(DrafterSpec):
    """The token that followed the last one."""

    longest: Annotated[int, Field(ge=1)] = 4
    method = "bigrams"
    drafter = Bigrams


@pytest.fixture
def installed(monkeypatch):
    entry = EntryPoint("bigrams", f"{__name__}:BigramsSpec", "paceline.drafters")
    monkeypatch.setattr(registry, "_installed", lambda: {"bigrams": entry})


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_instance_drafts_and_changes_no_answer(temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    llm = LLM(loaded(), drafter=Bigrams())
    assert llm.generate([[5, 6, 7, 5, 6]], params)[0].token_ids == (
        llm.plain().generate([[5, 6, 7, 5, 6]], params)[0].token_ids
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "given", ["bigrams:longest=6", '{"method": "bigrams", "longest": 6}', {"method": "bigrams", "longest": 6}]
)
def test_an_entry_point_has_a_name(given):
    config = parse(given, 2)
    drafter, _, _ = config.build()
    assert (type(drafter), drafter.longest) == (Bigrams, 6)
    assert parse(json.dumps(config.as_dict())) == config
    llm = LLM(loaded(), drafter=drafter)
    assert (
        len(llm.generate([[5, 6, 5]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))[0].token_ids) == 9
    )


@pytest.mark.usefixtures("installed")
def test_it_is_listed_where_ours_are(monkeypatch):
    assert [type(one) for one in parse("lookup+bigrams").build()[0].members] == [PromptLookup, Bigrams]
    assert "bigrams" in [config.name for config in candidates_of(None)]
    assert [one.remark for one in engine_flags(parse("bigrams"), {})] == ["has no bigrams"] * 3
    rows = {row["method"]: row for row in answer("models")["drafters"]}
    assert rows["bigrams"]["description"] == "The token that followed the last one."
    with pytest.raises(ConfigError, match=r"longest has a wrong value"):
        parse("bigrams:longest=0")
    with pytest.raises(ConfigError, match="one of longest="):
        parse("bigrams:shortest=1")
    with pytest.raises(ConfigError, match=r"self_top1, draft_model.*bigrams.*did you mean 'bigrams'"):
        parse({"method": "bigram"})


@pytest.mark.parametrize("row", registry.METHODS.values(), ids=lambda row: row.name)
def test_every_row_names_what_there_is(row):
    kind = spec_class(row.name)
    assert (kind.method, getattr(methods, row.drafter).__name__) == (row.name, row.drafter)
    if row.head:
        assert named(row.head).Config
    if row.recipe:
        assert (row.trained_as or row.name) in named(row.recipe).KINDS
    assert not row.exports or named(f"{row.layouts}:layout")
    assert row.exports.keys() <= ENGINES.keys()
