"""A draft model with a drafter of its own: the same drafts, in fewer of its passes."""

import pytest

from paceline import Coupled, DraftModel, Fixed, Medusa, Ouroboros, PromptLookup, SamplingParams, Suffix
from paceline.config import parse
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.draft_model import chain
from paceline.target import ModelRunner
from paceline.verify import Ratio
from tests.adversaries import Ending, RandomTrees, Wide
from tests.exactness import test_ratio as ratio
from tests.exactness.drafters import END, small_draft, twin
from tests.helpers import REPEATING, admit, loaded, prompt, sequence
from tests.methods.heads import medusa
from tests.methods.test_vocabularies import decode, reader
from tests.vision.families import seeing

SAMPLED = SamplingParams(0.8, top_k=20, max_tokens=40)
INNER = {
    "lookup": PromptLookup,
    "suffix": Suffix,
    "draft model": lambda: DraftModel(twin(small_draft())),
    "head": lambda: Medusa(medusa(small_draft())),
    "random trees": RandomTrees,
    "every token": Wide,
    "ends": lambda: Ending(END),
}


def chains_of(drafter: DraftModel, params: SamplingParams, depth: int = 5) -> tuple[list[list[int]], int]:
    """The drafts of two requests side by side, and the passes of the draft model."""
    drafts, passes, observe = list[list[int]](), 0, drafter.observe
    drafter.observe = lambda seqs, draft, *rest: (
        drafts.extend(draft.tree.lists.token_ids),
        observe(seqs, draft, *rest),
    )
    decoder = SpeculativeDecoder(ModelRunner(loaded(), 2), drafter, Coupled(), Fixed(depth))
    if drafter.chains.decoder is not None:
        drafter.chains.decoder.policy = Fixed(3, 6)
    forward = drafter.runner.forward

    def counted(*given, **options):
        nonlocal passes
        passes += 1
        return forward(*given, **options)

    drafter.runner.forward = counted
    seqs = [sequence(loaded(), ids, params, row) for row, ids in enumerate([REPEATING, prompt(9, 3)])]
    for seq in seqs:
        admit(decoder, seq)
    while active := [seq for seq in seqs if not seq.is_finished]:
        decoder.step(active)
    return drafts, passes


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=40), SAMPLED])
@pytest.mark.parametrize("inner", INNER)
def test_it_drafts_the_same(inner, params):
    drafts, passes = chains_of(DraftModel(small_draft()), params)
    nested, fewer = chains_of(DraftModel(small_draft(), inner_drafter=INNER[inner]()), params)
    assert nested == drafts
    assert fewer <= passes


def test_it_needs_fewer_passes():
    _, passes = chains_of(DraftModel(small_draft()), SAMPLED)
    _, fewer = chains_of(DraftModel(small_draft(), inner_drafter=DraftModel(twin(small_draft()))), SAMPLED)
    assert fewer < 0.6 * passes


@pytest.mark.parametrize("change", [{"seed": 1}, {"token_ids": [5]}, {"eos_ids": frozenset(range(0, 90, 2))}])
def test_a_mutant_is_caught(monkeypatch, change):
    """Another seed, another text, other ends."""
    made = chain.TokenSequence

    def changed(*given, **more):
        answer = made(*given, **more)
        for name, value in change.items():
            setattr(answer, name, answer.token_ids[:-1] + value if name == "token_ids" else value)
        return answer

    drafts, _ = chains_of(DraftModel(small_draft()), SAMPLED)
    monkeypatch.setattr(chain, "TokenSequence", changed)
    nested, _ = chains_of(DraftModel(small_draft(), inner_drafter=PromptLookup()), SAMPLED)
    assert nested != drafts


@pytest.mark.parametrize("inner", ["lookup", "head"])
def test_in_another_vocabulary(inner):
    draft = reader("sentencepiece", 1)
    made = {"lookup": PromptLookup, "head": lambda: Medusa(medusa(draft))}[inner]()
    params = [SamplingParams(t, max_tokens=24) for t in (0.0, 0.8)]
    seqs = decode(reader("byte level"), DraftModel(draft, inner_drafter=made), params)
    assert sum(record.num_drafted for seq in seqs for record in seq.rounds) > 20


def test_the_distribution_stays():
    drafter = DraftModel(ratio.draft(), inner_drafter=DraftModel(twin(ratio.draft())))
    assert ratio.p_value(ratio.sample(drafter, Ratio(), 300)) > ratio.FALSE_ALARM


@pytest.mark.parametrize(
    ("make", "target", "error", "message"),
    [
        (lambda: DraftModel("x", vocabulary="intersection", inner_drafter=Suffix()), loaded, ConfigError, "strings"),
        (lambda: Ouroboros(DraftModel("x", inner_drafter=Suffix())), loaded, ConfigError, "phrases"),
        (lambda: parse("model:x,inner_drafter=nothing").build(), loaded, ConfigError, "unknown drafter"),
        (lambda: DraftModel(seeing(seed=1), inner_drafter=Suffix()), seeing, IncompatibleModels, "inner_drafter"),
        (lambda: DraftModel(small_draft(), inner_drafter=Medusa(medusa(loaded()))), loaded, IncompatibleModels, "head"),
    ],
)
def test_what_does_not_fit_is_refused(make, target, error, message):
    with pytest.raises(error, match=message):
        SpeculativeDecoder(ModelRunner(target(), 2), make(), Coupled(), Fixed())
