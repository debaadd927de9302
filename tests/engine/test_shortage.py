"""A drafter without memory: whatever it was about to compute, it costs the draft and never the answer."""

import logging
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import LLM, Choose, Coupled, DraftModel, Eagle, Fixed, Medusa, PromptLookup, SamplingParams
from paceline.attention import kv_cache
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import CacheFull, DraftError
from paceline.kernels import library
from paceline.methods import DFlash, DSpark
from paceline.target import LoadedModel, ModelRunner
from paceline.verify import Ratio
from tests.adversaries import Constant
from tests.exactness.drafters import DRAFTERS, small_draft, twin
from tests.helpers import REPEATING, all_free, generate, loaded, on_torch, oracle, prompt, result, sequence
from tests.methods.heads import medusa, random_head
from tests.methods.tokenizers_made import reader
from tests.tiny import tiny_model

HEADS = {
    "eagle": lambda target, future: Eagle(random_head(target, 1)),
    "p-eagle": lambda target, future: Eagle(random_head(target, 3, mask_token_id=0, num_speculative_tokens=4)),
    "dflash": lambda target, future: DFlash(random_head(target, "dflash")),
    "dspark": lambda target, future: DSpark(random_head(target, "dspark")),
    "medusa": lambda target, future: Medusa(medusa(target)),
    "a draft that drafts": lambda target, future: DraftModel(small_draft(), inner_drafter=PromptLookup()),
    "chosen": lambda target, future: Choose([PromptLookup(), DraftModel(twin(target)), Eagle(random_head(target, 1))]),
}
NAMES = (
    "suffix",
    "recycling",
    "lookahead",
    "draft model",
    "ouroboros, same weights",
    "self int4",
    "space",
    "least likely",
)
OURS = {name: DRAFTERS[name] for name in NAMES} | HEADS
ASKED = [(REPEATING, SamplingParams(max_tokens=9)), (prompt(9, 3), SamplingParams(1.0, max_tokens=9))]
ERRORS = MemoryError, torch.OutOfMemoryError, partial(CacheFull, "no memory"), partial(OSError, 12, "no memory")


class Shortage(TorchDispatchMode):
    """Counts operations inside a drafter. Number `first` gets no memory, and with `lasts` none after it does."""

    def __init__(self, first: int = 0, lasts: bool = False):
        super().__init__()
        self.first, self.lasts, self.count, self.is_inside = first, lasts, 0, False

    def tick(self) -> None:
        self.count += self.is_inside
        if self.is_inside and 0 < self.first <= self.count and (self.lasts or self.count == self.first):
            raise ERRORS[self.count % len(ERRORS)]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.tick()
        return func(*args, **(kwargs or {}))

    def around(self, method):
        def call(*given):
            self.is_inside = True
            try:
                with self:
                    return method(*given)
            finally:
                self.is_inside = False

        return call


def drafted(make, target: LoadedModel, shortage: Shortage, monkeypatch) -> int:
    """Check the answers of two requests side by side; returns how many tokens were drafted."""
    future = {tuple(ids): oracle(target, ids, params).token_ids for ids, params in ASKED}
    drafter = make(target, future)
    decoder = SpeculativeDecoder(ModelRunner(target, 2), drafter, Coupled(), Fixed(4, 12))
    with monkeypatch.context() as patched:
        run = library.run
        patched.setattr(library, "run", lambda *given: (shortage.tick(), run(*given)))
        for verb in ("draft_options", "propose", "observe"):
            patched.setattr(drafter, verb, shortage.around(getattr(drafter, verb)))
        seqs = [sequence(target, *one) for one in ASKED]
        for _ in generate(decoder, seqs):
            pass
    assert [result(seq) for seq in seqs] == [result(oracle(target, *one)) for one in ASKED]
    assert all_free(decoder.runner)
    return sum(record.num_drafted for seq in seqs for record in seq.rounds)


def check(make, target, places: int, monkeypatch) -> None:
    whole = Shortage()
    most = drafted(make, target, whole, monkeypatch)
    for first in {1, *range(2, whole.count + 1, max(1, whole.count // places)), whole.count}:
        short = Shortage(first)
        assert drafted(make, target, short, monkeypatch) or not most or short.count <= first
        drafted(make, target, Shortage(first, lasts=True), monkeypatch)
    assert first or not most


@pytest.mark.parametrize("drafter", OURS)
def test_a_shortage_at_any_operation(drafter, monkeypatch):
    check(OURS[drafter], loaded(), 4, monkeypatch)


@pytest.mark.parametrize("drafter", ["draft model", "self int4", "eagle", "dflash", "dspark", "medusa"])
def test_a_shortage_in_torch(drafter, monkeypatch):
    check(OURS[drafter], on_torch(tiny_model("llama")), 3, monkeypatch)


def no_memory() -> torch.Tensor:
    return torch.empty(1 << 50)


SHORT = [(lambda: no_memory(), True), *[(error, True) for error in ERRORS], (lambda: RuntimeError("size"), False)]


@pytest.mark.parametrize(("fails", "is_spared"), SHORT)
@pytest.mark.parametrize("verb", ["draft_options", "propose", "observe"])
def test_only_a_shortage_is_spared(verb, fails, is_spared, caplog):
    """A fault of the drafter stays an error. The log has one warning, not one for each round."""

    class Failing(Constant):
        name = "failing"

    def fail(self, *given):
        raise fails()

    setattr(Failing, verb, fail)
    llm = LLM(loaded(), drafter=Failing(), policy=Fixed(3))
    params = SamplingParams(max_tokens=8)
    if not is_spared:
        with pytest.raises(DraftError if verb != "draft_options" else RuntimeError, match="size"):
            llm.generate(REPEATING, params)
        return
    with caplog.at_level(logging.WARNING):
        assert llm.generate(REPEATING, params)[0].token_ids == llm.plain().generate(REPEATING, params)[0].token_ids
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'failing' cannot draft now" in caplog.text


def test_a_text_that_was_changed_before_is_not_spared():
    class Writing(Constant):
        def propose(self, seqs, budgets):
            seqs[0].token_ids.append(6)
            raise MemoryError

    with pytest.raises(DraftError, match="changed the tokens"):
        LLM(loaded(), drafter=Writing(), policy=Fixed(3)).generate(REPEATING)


def test_a_draft_model_without_its_first_columns(monkeypatch):
    """Its cache has no tensors before its first pass. Later there is memory again, and drafts."""
    llm, params = LLM(loaded(), drafter=DraftModel(twin(loaded())), policy=Fixed(3)), SamplingParams(max_tokens=12)
    with monkeypatch.context() as patched:
        patched.setattr(kv_cache, "available_memory", lambda: 0)
        got = llm.generate([REPEATING, prompt(9, 3)], params)
        assert [one.token_ids for one in got] == [
            one.token_ids for one in llm.plain().generate([REPEATING, prompt(9, 3)], params)
        ]
    assert not sum(record.num_drafted for one in got for record in one.rounds)
    assert sum(record.num_drafted for record in llm.generate(REPEATING, params)[0].rounds)


def test_the_other_members_go_on():
    class Failing(Constant):
        name = "failing"

        def draft_options(self, seq):
            raise MemoryError

    llm = LLM(loaded(), drafter=Choose([Failing(), Constant()]), policy=Fixed(3))
    got = llm.generate(REPEATING, SamplingParams(max_tokens=8))[0]
    assert {record.source for record in got.rounds if record.num_drafted} == {Constant.name}


BROKEN = {
    "alone": lambda: DraftModel(small_draft()),
    "other tokens": lambda: DraftModel(reader("byte level", 1)),
    "with a drafter of its own": lambda: DraftModel(small_draft(), inner_drafter=PromptLookup()),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("verifier", [Coupled, Ratio])
@pytest.mark.parametrize("draft", BROKEN)
def test_a_draft_model_whose_numbers_overflow(draft, verifier, value):
    """It drafts nothing from there on, also where its distribution is asked for."""
    target = reader("sentencepiece") if draft == "other tokens" else loaded()
    drafter = BROKEN[draft]()
    llm = LLM(target, drafter=drafter, policy=Fixed(3), verifier=verifier(), seed=1)
    forward, params = drafter.runner.forward, SamplingParams(0.8, max_tokens=10, seed=3, ignore_eos=True)
    drafter.runner.forward = lambda *given, **options: forward(*given, **options) * value
    got = llm.generate(REPEATING, params)[0]
    assert len(got.token_ids) == 10
    assert not sum(record.num_drafted for record in got.rounds)
    drafter.runner.forward = forward
    assert sum(record.num_drafted for record in llm.generate(REPEATING, params)[0].rounds)
