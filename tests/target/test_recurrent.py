"""Recurrent layers: texts, trees and what follows commits as plain transformers computes them."""

import random
from functools import cache
from typing import Any

import pytest
import torch

from paceline import Choose, DraftModel, PromptLookup, SamplingParams, SelfQuantized
from paceline.attention.recurrent import RecurrentStates
from paceline.core.tree import TokenTree
from paceline.errors import CacheFull, NumericsError
from paceline.target import LoadedModel, ModelRunner, make_runner, wrap_model
from paceline.target.recurrent_layers import InWaves, Mixer
from paceline.target.waves import Waves
from tests.adversaries import Constant, LeastLikely, RandomTrees, Scripted
from tests.exactness.test_identity import REQUESTS, Varying
from tests.helpers import NO_EOS, REPEATING, SEED, assert_identical, on_torch, oracle, prompt
from tests.tiny import RECURRENT, tiny_model

FEW, *MORE = [[*RECURRENT][:3], *[*RECURRENT][3:]]
NAMES = [*FEW, *(pytest.param(name, marks=pytest.mark.more) for name in MORE)]
EXACT = 2e-3  # of the standard deviation of logits; faults make it more than a tenth


@cache
def loaded(name: str, **overrides: Any) -> LoadedModel:
    return on_torch(tiny_model(name, **overrides))


@cache
def plain(name: str):
    return tiny_model(name)


def expected(name: str, ids: list[int]) -> torch.Tensor:
    """The oracle: no cache, one row."""
    with torch.inference_mode():
        return plain(name)(torch.tensor([ids]), use_cache=False).logits[0, -1].float()


def apart(name: str, logits: torch.Tensor, ids: list[int]) -> float:
    wanted = expected(name, ids)
    return float((logits.float() - wanted).abs().max() / wanted.std())


class Texts:
    """Two texts that grow by random trees, of which random paths are committed."""

    def __init__(self, name: str, chunk: int = 512, seed: int = 0, pages: bool = False):
        self.name, self.rng = name, random.Random(seed)
        self.on = ModelRunner(loaded(name), 2)
        self.on.chunk = chunk
        if self.on.cache.recurrent is not None:
            self.on.cache.recurrent.stops_at_pages = pages
        self.texts = [prompt(20, seed), prompt(9, seed + 1)]
        self.slots = [self.on.admit(text) for text in self.texts]
        for slot, text in zip(self.slots, self.texts, strict=True):
            self.on.prefill(slot, text)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 97) for _ in range(count)]

    def round(self, compared: bool = True) -> float:
        """A pass and a commit; returns how far a leaf of each text is off."""
        sizes = [self.rng.randint(1, 7) for _ in self.texts]
        parents = [[-1, *(self.rng.randrange(node) for node in range(1, size))] for size in sizes]
        tokens = [[text[-1], *self.tokens(size - 1)] for text, size in zip(self.texts, sizes, strict=True)]
        tree = TokenTree.from_lists(tokens, parents)
        logits, worst = self.on.forward(self.slots, tree), 0.0
        paths = [row.path_to(self.rng.randrange(len(row))) for row in tree.rows]
        for row, path in enumerate(paths):
            read = self.texts[row] + [tokens[row][node] for node in path]
            if compared:
                worst = max(worst, apart(self.name, logits[row, path[-1] if path else 0], read))
            self.texts[row] = read + self.tokens(1)
        self.on.commit(self.slots, paths)
        return worst


@pytest.mark.parametrize("name", NAMES)
def test_trees_and_what_follows_them_equal_plain_transformers(name):
    texts = Texts(name)
    assert max(texts.round() for _ in range(6)) < EXACT
    for _ in range(30):
        texts.round(compared=False)
    assert max(texts.round() for _ in range(3)) < EXACT


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if i % 2 else pytest.mark.more) for i, name in enumerate(RECURRENT)],
)
def test_after_many_rounds(name):
    """Without positions to run out of, states would keep a fault for ever."""
    texts = Texts(name, seed=5)
    for _ in range(100):
        if max(map(len, texts.texts)) > 200:
            texts = Texts(name, seed=texts.rng.randrange(99))
        texts.round(compared=False)
    assert texts.round() < EXACT


@pytest.mark.parametrize("chunk", [1, 7, 11, 512])
@pytest.mark.parametrize("name", [*FEW, pytest.param("mamba", marks=pytest.mark.more)])
def test_texts_in_chunks_and_states_that_stop_at_pages(name, chunk):
    assert Texts(name, chunk).round() < EXACT
    texts = Texts(name, chunk, pages=True)
    assert max(texts.round() for _ in range(3)) < EXACT


def test_rings_grow_while_a_pass_waits_for_its_commit():
    """Every prompt ends in a pass of its own, and the commits follow together."""
    asked = [(prompt(length), SamplingParams(1.0, max_tokens=6), SEED, NO_EOS) for length in (13, 40, 70)]
    assert_identical(ModelRunner(loaded("mamba2"), 3), PromptLookup(), asked)


@pytest.mark.parametrize("length", [5, 12])
@pytest.mark.parametrize("name", [*FEW, "mamba"])
def test_texts_in_a_batch(name, length):
    """As in training, read in two passes."""
    target, texts = loaded(name), [prompt(2 * length, seed) for seed in range(3)]
    cache = target.new_cache(3, 2 * length)
    slots, logits = [cache.allocate() for _ in texts], torch.empty(0)
    for begin in (0, length):
        layout = target.begin(cache, slots, length)
        with torch.inference_mode():
            logits = target.forward(torch.tensor(texts)[:, begin : begin + length], layout, cache)
        cache.lengths[:] = [begin + length] * 3
    assert max(apart(name, row[-1], text) for row, text in zip(logits, texts, strict=True)) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_tentative_commits_leave_no_trace(name):
    texts = Texts(name)
    texts.round()
    before = list(texts.texts)
    with texts.on.tentative(texts.slots):
        for _ in range(4):
            texts.round(compared=False)
    texts.texts = before
    assert texts.round() < EXACT


def test_what_the_states_have_passed_is_read_again():
    texts = Texts("qwen3_5")
    slot, text = texts.slots[0], texts.texts[0]
    texts.on.cache.truncate(slot, len(text) - 1)
    assert texts.on.cache.lengths[slot] == len(text) - 1
    texts.on.cache.truncate(slot, len(text) - 5)
    assert texts.on.cache.lengths[slot] == 0
    texts.on.prefill(slot, text)
    assert texts.round() < EXACT


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_a_pass_leaves_states_as_they_were(error, monkeypatch):
    texts = Texts("qwen3_5")
    texts.round()
    layers = [module for module in texts.on.loaded.model.modules() if isinstance(module, InWaves)]
    held = texts.on.cache.recurrent
    assert held is not None
    before = held.copy_of(texts.slots[0]), list(held.bases)

    def fail(self, mixer, run):
        if mixer.place == len(layers) - 1:
            raise error
        return whole(self, mixer, run)

    whole = Waves.run
    monkeypatch.setattr(Waves, "run", fail)
    with pytest.raises(error):
        texts.round()
    monkeypatch.undo()
    after = held.copy_of(texts.slots[0]), list(held.bases)
    assert after[1] == before[1]
    assert all(map(torch.equal, after[0], before[0]))
    assert texts.round() < EXACT


def sibling(self, at_once):
    plan = planned(self, at_once)
    for before, wave in zip(plan.waves, plan.waves[1:], strict=False):
        wave.parents = (wave.parents + 1) % len(before.sources)
    return plan


planned, unpacked, finish, commit = Waves._planned, Mixer.unpacked, RecurrentStates.finish, RecurrentStates.commit


def late_tail(self, rows):
    held = unpacked(self, rows)
    return {key: state.roll(1, -1) if key[0] == "conv" else state for key, state in held.items()}


def rejected_leaf(self, slot, start, nodes):
    commit(self, slot, start, [*nodes[:-1], nodes[-1] - 1] if nodes else nodes)


def walked_twice(self):
    bases = list(self.bases)
    finish(self)
    self.bases = [max(before, now - 1) for before, now in zip(bases, self.bases, strict=True)]


MUTANTS = {
    "the state of a sibling": (Waves, "_planned", sibling),
    "the rows of the tree in its order": (RecurrentStates, "commit", lambda *_: None),
    "a rejected leaf": (RecurrentStates, "commit", rejected_leaf),
    "a token twice": (RecurrentStates, "finish", walked_twice),
    "the tail of a convolution one token late": (Mixer, "unpacked", late_tail),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(mutant, monkeypatch):
    texts = Texts("qwen3_5", seed=3)
    monkeypatch.setattr(*MUTANTS[mutant])
    assert max(texts.round() for _ in range(6)) > 10 * EXACT


def two(name: str, drafter, max_tokens: int = 16, **overrides: Any) -> list:
    """A greedy and a sampled answer, equal to the slow decoder's."""
    asked = [([*REPEATING, 3 + int(t)], SamplingParams(t, max_tokens=max_tokens), SEED, NO_EOS) for t in (0.0, 1.0)]
    return assert_identical(ModelRunner(loaded(name, **overrides), 2), drafter, asked)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *((name, drafter) for name in FEW for drafter in (PromptLookup, RandomTrees, LeastLikely)),
        *(pytest.param(name, RandomTrees, marks=pytest.mark.more) for name in MORE),
        *(
            pytest.param(name, drafter, marks=pytest.mark.slow)
            for name in MORE
            for drafter in (PromptLookup, LeastLikely)
        ),
    ],
)
def test_answers_are_those_of_plain_decoding(name, drafter):
    two(name, drafter())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else pytest.mark.more) for i, name in enumerate(FEW)]
)
def test_many_requests(name):
    """All options and ends, in batches of three, by several drafters in turns."""
    members = [PromptLookup(), DraftModel(wrap_model(tiny_model(name, seed=1))), SelfQuantized(lm_head="shared")]
    for drafter in (RandomTrees(), Choose(members)):
        assert_identical(ModelRunner(loaded(name), 3), drafter, REQUESTS, 16, policy=Varying(3))


@pytest.mark.parametrize("name", FEW)
def test_a_perfect_draft_is_accepted(name):
    asked = ([*REPEATING, 3], SamplingParams(0.0, max_tokens=16), SEED, NO_EOS)
    future = {tuple(asked[0]): oracle(loaded(name), *asked).token_ids}
    for script in ([None], [0, 2, None]):
        (seq,) = assert_identical(ModelRunner(loaded(name), 1), Scripted(future, script, True), [asked])
        assert max(one.num_accepted for one in seq.rounds) == 4


@pytest.mark.parametrize("name", FEW)
def test_drafts_by_models_with_states(name):
    """A model of the same weights, whose states must forget what was rejected, and the target's own layers in INT4."""
    for seq in two(name, DraftModel(wrap_model(tiny_model(name)))):
        assert max(one.num_accepted for one in seq.rounds) > 2
    two(name, DraftModel(wrap_model(tiny_model(name, seed=1))))
    two(name, SelfQuantized(lm_head="shared"))


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_weights_that_a_layer_reads_itself_stay_plain(name):
    """Of so many steps that INT4 would take them."""
    ranks = {"time_step_rank": 32, "mamba_dt_rank": 32}
    two(name, SelfQuantized(lm_head="shared"), **ranks)


def test_a_state_budget_that_is_too_small(monkeypatch):
    monkeypatch.setattr("paceline.attention.kv_cache.available_memory", lambda: 100_000)
    with pytest.raises(CacheFull, match=r"a recurrent state of [\d,]+ bytes a sequence.*lower max_num_seqs"):
        ModelRunner(loaded("qwen3_5"), 64, 64)


def test_numerics_are_fast():
    assert make_runner(loaded("qwen3_5"), 1, 64, invariant=None).numerics == "fast"
    with pytest.raises(NumericsError, match="torch computes its recurrent layers"):
        make_runner(loaded("qwen3_5"), 1, 64, invariant=True)


def test_the_callers_model_stays_as_it_was():
    model = tiny_model("qwen3_5")
    wrap_model(model)
    assert not any(isinstance(module, InWaves) for module in model.modules())
    assert wrap_model(wrap_model(model).model).recurrent


def test_drafts_of_the_target_itself_leave_its_states():
    two("qwen3_5", Constant(), 40)
