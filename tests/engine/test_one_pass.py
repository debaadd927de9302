"""A drafted answer that ends within the first draft costs one pass of the target, and nothing else changes."""

from types import SimpleNamespace

import pytest

from paceline import LLM, Choose, Coupled, DraftModel, Fixed, Plain, PromptLookup, SamplingParams, SelfQuantized
from paceline.core.interfaces import DrafterInfo
from paceline.core.round import Timings
from paceline.core.tree import TokenTree
from paceline.engine import first_pass, loop
from paceline.engine.loop import SpeculativeDecoder
from paceline.policy import CostModel
from paceline.policy.costs import RoundSeconds
from paceline.policy.plan import Plan
from paceline.target import LoadedModel, ModelRunner, wrap_model
from tests.adversaries import Constant, RandomTrees
from tests.exactness.drafters import small_draft, twin
from tests.helpers import (
    REPEATING,
    admit,
    assert_identical,
    changed,
    generate,
    loaded,
    needs_invariance,
    oracle,
    prompt,
    result,
    sequence,
)
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("unchecked_types")
SHORT = SamplingParams(max_tokens=4)


class UnreadTrees(RandomTrees):
    """Random trees that are there before the prompt is read."""

    info = DrafterInfo(drafts_during_prefill=True)


class UnreadConstant(Constant):
    info = DrafterInfo(drafts_during_prefill=True)


@pytest.fixture
def passes(monkeypatch):
    """(rows, with logits) of each pass of the tiny target."""
    seen, target, real = list[tuple[int, bool]](), loaded(), LoadedModel.forward

    def counted(self, ids, layout, *rest):
        if self is target:
            seen.append((layout.num_nodes, layout.head_rows != 0))
        return real(self, ids, layout, *rest)

    monkeypatch.setattr(LoadedModel, "forward", counted)
    return seen


def decode(on, drafter, prompts, params=SHORT, depth=4, passes=None):
    """Each answer is the slow decoder's, whose passes are not counted."""
    requests = [(ids, params, 7 + row) for row, ids in enumerate(prompts)]
    if passes is not None:
        _ = [oracle(on.loaded, *one) for one in requests]
        passes.clear()
    return assert_identical(on, drafter, requests, depth, 16)


@pytest.mark.parametrize("length", [2, 3, 9, 64, 65, 129, 200])
def test_a_short_drafted_answer_costs_one_pass(passes, length):
    target = loaded()
    on = ModelRunner(target, 2)
    (seq,) = decode(on, DraftModel(twin(target)), [prompt(length)], depth=3, passes=passes)
    assert passes == [(length - 1 + 4, True)]
    assert [r.with_prompt for r in seq.rounds] == [True]


@pytest.mark.parametrize(
    ("drafter", "ids"),
    [
        (Plain, REPEATING),
        (lambda: SelfQuantized(lm_head="shared"), REPEATING),  # it drafts from the target's own keys
        (PromptLookup, list(range(3, 12))),  # finds nothing
    ],
)
def test_where_nothing_is_drafted_early_the_first_token_comes_with_the_prompt(passes, drafter, ids):
    on = ModelRunner(loaded(), 1)
    (seq,) = decode(on, drafter(), [ids], passes=passes)
    assert passes[0] == (len(ids), True)
    assert seq.rounds[0].with_prompt
    assert not any(one.with_prompt for one in seq.rounds[1:])


def test_a_policy_that_drafts_nothing_changes_nothing(passes):
    on = ModelRunner(loaded(), 1)
    seen = []
    for drafter in (Plain(), PromptLookup()):
        decode(on, drafter, [REPEATING], depth=0, passes=passes)
        seen.append(list(passes))
    assert seen[0] == seen[1]


def test_a_prompt_of_one_token_has_nothing_unread(passes):
    on = ModelRunner(loaded(), 1)
    (seq,) = decode(on, DraftModel(twin(loaded())), [[5]], depth=3, passes=passes)
    assert passes == [(4, True)]
    assert not seq.rounds[0].with_prompt


DRAFTERS = {
    "draft model": lambda: DraftModel(small_draft()),
    "same weights": lambda: DraftModel(twin(loaded())),
    "lookup": PromptLookup,
    "trees": UnreadTrees,
    "wrong": UnreadConstant,
    "choose": lambda: Choose([PromptLookup(), SelfQuantized(lm_head="shared")]),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_those_of_the_slow_decoder(drafter, temperature):
    """Mixed lengths around blocks of 64 columns, more requests than slots."""
    params = SamplingParams(temperature=temperature, max_tokens=7)
    prompts = [REPEATING, prompt(2, 1), prompt(64, 2), prompt(66, 3) + REPEATING, [9], prompt(130, 4)]
    decode(ModelRunner(loaded(), 3), DRAFTERS[drafter](), prompts, params)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mistral", "opt", "gpt_oss", "granite", "deepseek_v3"])
def test_architectures(name):
    """Windows, soft caps, sinks, learned positions, scaled logits, an attention of their own."""
    target, params = loaded(name), SamplingParams(max_tokens=6)
    prompts = [REPEATING, prompt(70)]
    seqs = decode(ModelRunner(target, 2), UnreadTrees(), prompts, params)
    assert any(r.with_prompt for seq in seqs for r in seq.rounds)


def test_its_seconds_are_those_of_the_prefill(monkeypatch):
    """By a clock that stands still but for passes: 30 s one that reads, 1 s another."""
    real, on, now = ModelRunner.forward, ModelRunner(loaded(), 1), [0.0]

    def timed(self, slots, tree, text=(), **options):
        now[0] += 30.0 if text else 1.0
        return real(self, slots, tree, text, **options)

    monkeypatch.setattr(ModelRunner, "forward", timed)
    for module in (loop, first_pass):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    decoder = SpeculativeDecoder(on, DraftModel(twin(loaded())), Coupled(), Fixed(3))
    seq = sequence(on.loaded, REPEATING, SamplingParams(max_tokens=8))
    list(generate(decoder, [seq]))
    assert [record.with_prompt for record in seq.rounds] == [True, False]
    timings = Timings.of(seq.rounds)
    assert (timings.prefill, timings.verify) == (30.0, 1.0)
    assert [record.verify_s for record in seq.rounds] == [0.0, 1.0]


def test_policies_do_not_take_them_for_a_pass(monkeypatch):
    """What a round with a prompt took is not learnt as the cost of verifying; what was accepted is."""
    seen = list[int]()
    real = RoundSeconds.observe
    monkeypatch.setattr(
        RoundSeconds, "observe", lambda self, nodes, *rest: seen.append(nodes) or real(self, nodes, *rest)
    )
    policy = CostModel(4)
    on, drafter = ModelRunner(loaded(), 1), DraftModel(twin(loaded()))
    decoder = SpeculativeDecoder(on, drafter, Coupled(), policy)
    policy.measure(64)
    for _ in range(8):
        list(generate(decoder, [sequence(loaded(), REPEATING, SamplingParams(max_tokens=2))]))
    monkeypatch.setattr("paceline.policy.cost_model.best_plan", all_of_it)
    monkeypatch.setattr(policy, "_key", None)  # it does not rest
    monkeypatch.setattr(CostModel, "_may_read", lambda *_: True)  # whatever this machine's clock says of it
    before, tries = len(seen), policy.odds.tries("draft_model")
    seq = sequence(loaded(), REPEATING, SamplingParams(max_tokens=4))
    list(generate(decoder, [seq]))
    assert seq.rounds[0].with_prompt
    assert len(seen) - before == sum(not r.with_prompt for r in seq.rounds)
    assert policy.odds.tries("draft_model") > tries


def all_of_it(rows, seconds, speed, credit, max_nodes):
    return Plan(1e6, 1e6, [row[0] if row else None for row in rows], 3, 3)


def test_chunks():
    """Of a prompt that is longer than a chunk, the last chunk alone shares the pass."""
    target = wrap_model(tiny_model("llama", max_position_embeddings=2048))
    on = ModelRunner(target, 1)
    for length in (512, 513, 514, 1025, 1100):
        decoder = SpeculativeDecoder(on, UnreadTrees(), Coupled(), Fixed(4, 8))
        seq = sequence(target, prompt(length), SHORT)
        admit(decoder, seq)
        assert len(first_pass.deferred_tokens(on, seq)) == (length - 2) % 512 + 1
        decoder.step([seq])
        assert not first_pass.deferred_tokens(on, seq)
        assert on.cache.lengths[seq.slot] == seq.num_cached
        decoder.release(seq)
        for drafter in (Plain(), UnreadTrees()):
            decode(on, drafter, [prompt(length)])


def test_a_step_that_fails_leaves_the_prompt_unread():
    on = ModelRunner(loaded(), 1)
    drafter = UnreadConstant(10_000)
    decoder = SpeculativeDecoder(on, drafter, Coupled(), Fixed(2))
    seq = sequence(loaded(), REPEATING, SHORT)
    admit(decoder, seq)
    with pytest.raises(Exception, match="outside the vocabulary"):
        decoder.step([seq])
    drafter.token = 7
    while not seq.is_finished:
        decoder.step([seq])
    assert result(seq) == result(oracle(loaded(), REPEATING, SHORT))
    decoder.release(seq)


@pytest.mark.parametrize("mutant", ["one column early", "forgets the text"])
def test_mutants_are_caught(monkeypatch, mutant):
    if mutant == "one column early":
        real_tree = TokenTree.behind
        monkeypatch.setattr(TokenTree, "behind", lambda tree, text: _early(real_tree(tree, text), len(text)))
    else:
        real = ModelRunner.forward

        def cut(on, slots, tree, text=(), **options):
            return real(on, slots, tree, text[:-1], **options)

        monkeypatch.setattr(ModelRunner, "forward", cut)
    prompts, params = [REPEATING, prompt(40)], SamplingParams(max_tokens=12)
    with pytest.raises((AssertionError, RuntimeError)):
        decode(ModelRunner(loaded(), 2), DraftModel(twin(loaded())), prompts, params)


def _early(whole: TokenTree, count: int) -> TokenTree:
    """The root hangs under the text's last token but one."""
    (parents,) = whole.lists.parents
    return changed(whole, parents=[[*parents[:count], count - 2, *parents[count + 1 :]]])


@pytest.mark.parametrize("drafter", [PromptLookup, RandomTrees])
def test_soft_caps_keep_their_bits_in_batches_and_first_passes(drafter):
    """Prompts that end shortly behind a block of columns: log-probabilities to the last bit."""
    target = loaded("gemma2", max_position_embeddings=512)
    spec = LLM(target, drafter=drafter(), policy=Fixed(5, 10), max_num_seqs=3, numerics=None)
    needs_invariance(spec.numerics)
    alone = LLM(target, max_num_seqs=1, numerics="invariant")
    params = SamplingParams(max_tokens=10, logprobs=0)
    for trial in range(4):
        texts = [(prompt(5 + i, trial) * 20)[: 66 + (7 * trial + 5 * i) % 24] for i in range(3)]
        want = [alone.generate(text, params)[0].outputs[0].logprobs for text in texts]
        for llm in (spec, spec.plain()):
            assert [one.outputs[0].logprobs for one in llm.generate(texts, params)] == want


class Counts(RandomTrees):
    """Notes for which depths it was asked."""

    def __init__(self):
        super().__init__()
        self.depths = list[list[int]]()

    def propose(self, seqs, budgets):
        self.depths.append([budget.depth for budget in budgets])
        return super().propose(seqs, budgets)


@pytest.mark.parametrize("depth", [0, 2])
def test_rounds_without_a_budget_ask_no_drafter(depth):
    drafter, prompts, params = Counts(), [prompt(9), prompt(5)], SamplingParams(max_tokens=9)
    decode(ModelRunner(loaded(), 2), drafter, prompts, params, depth)
    assert bool(drafter.depths) == (depth > 0)
    assert all(any(row) for row in drafter.depths)
