"""What EAGLE drafts, level by level from its cache, against the whole head over the whole path."""

import math
from functools import partial

import pytest
import torch

from paceline import Coupled, SamplingParams
from paceline.attention.kv_cache import SlotCache
from paceline.core.interfaces import DraftBudget
from paceline.errors import IncompatibleModels
from paceline.methods import Eagle
from paceline.methods.eagle.passes import FEW, EaglePass
from paceline.methods.heads import draft_layer
from paceline.target import ModelRunner
from paceline.verify import Ratio
from tests.helpers import REPEATING, loaded, prompt, sequence
from tests.methods.heads import DTYPES, MASKS, WIDE, differing, random_head, target


@pytest.mark.diagonal
@DTYPES
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_every_node_has_the_law_of_the_whole_head(version, tree, dtype):
    head = random_head(target(dtype), version)
    assert not differing(Eagle(head, tree), head)


@pytest.mark.diagonal
@DTYPES
@pytest.mark.parametrize("tree", ["dynamic", "static", "chain"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_peagle_drafts_all_levels_in_one_pass(temperature, tree, dtype, monkeypatch):
    monkeypatch.setattr("paceline.methods.eagle.passes.EaglePass.step", None)
    head = random_head(target(dtype), 3, **MASKS)
    assert not differing(Eagle(head, tree), head, temperature=temperature)


class MasksAsLong(Eagle):
    """Rows of a batch are taken to have as many pairs as the longest."""

    def _catch_up(self, seqs, *rest, **masks):
        level = super()._catch_up(seqs, *rest, **masks)
        return draft_layer.Level(level.hidden, level.logits.roll(1, 1) if len(seqs) > 1 else level.logits)


def test_peagle_drafts_no_deeper_than_it_was_made_for():
    head = random_head(target(), 3, mask_token_id=7, num_speculative_tokens=2)
    drafter, runner = Eagle(head, "chain"), ModelRunner(target(), 2)
    drafter.bind(runner, Coupled())
    seq = sequence(target(), REPEATING, SamplingParams(max_tokens=50))
    seq.slot = runner.admit(REPEATING)
    runner.extend_cache(seq.slot, REPEATING[:-1])
    assert drafter.propose([seq], [WIDE]).tree.num_nodes == 3
    assert drafter.seconds()["peagle"][0] > 0


OPTIONS = {
    "own output layer": {"own_lm_head": True},
    "layers of Qwen3": {"qk_norm": True, "num_hidden_layers": 2},
    "layers of Qwen3.5": {"qk_norm": True, "output_gate": True, "partial_rotary_factor": 0.5},
    "biases": {"fc_bias": True, "attention_bias": True},
    "residual normed": {"norm_before_residual": True},
    "another rotation": {"rope_theta": 500.0, "rms_norm_eps": 1e-3},
    "a scaled rotation": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "a window": {"window": 3},
    "the last pair alone": {"window": 1},
    "three layers": {"num_hidden_layers": 3},
}
LATER = {
    "norms of EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "normed before fc": {"norm_before_fc": True},
    "P-EAGLE's norms": {"fc_norm": True, "norm_output": True, **MASKS},
    "P-EAGLE normed before fc": {"norm_before_fc": True, **MASKS},
    "P-EAGLE of two layers": {"num_hidden_layers": 2, **MASKS},
}
"""Of version 3 alone."""


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("version", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.float64), ("mtp", torch.float32)]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_form_of_head(options, version, dtype):
    head = random_head(target(dtype), version, **options)
    assert not differing(Eagle(head, top_k=3), head, rounds=3)


@DTYPES
@pytest.mark.parametrize("options", LATER.values(), ids=LATER)
def test_later_forms_of_head(options, dtype):
    head = random_head(target(dtype), 3, **options)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    assert not differing(Eagle(head), head)


def cache_of_one_layer(target, config):
    """Mutant: all layers write and read the same keys and values."""
    cache = draft_layer.head_cache(target, config)
    cache.keys[1:], cache.values[1:] = cache.keys[:1], cache.values[:1]
    return cache


@DTYPES
def test_a_mutant_whose_layers_share_a_cache_is_caught(dtype, monkeypatch):
    monkeypatch.setattr("paceline.methods.eagle.passes.head_cache", cache_of_one_layer)
    head = random_head(target(dtype), 3, num_hidden_layers=2)
    assert differing(Eagle(head), head)


@pytest.mark.usefixtures("checked_types")
@DTYPES
@pytest.mark.parametrize(("verifier", "temperature"), [(Coupled, 0.6), (Ratio, 1.7)])
def test_temperature(temperature, verifier, dtype):
    head = random_head(target(dtype), 3)
    assert not differing(Eagle(head), head, temperature=temperature, rounds=3, verifier=verifier())


class SmallCache(SlotCache):
    """Starts with 8 columns, so that it has to grow."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.capacity = 8


@DTYPES
def test_long_texts_and_growing_caches(monkeypatch, dtype):
    monkeypatch.setattr("paceline.methods.eagle.passes.CHUNK", 32)
    monkeypatch.setattr("paceline.methods.heads.draft_layer.SlotCache", SmallCache)
    head = random_head(target(dtype), 3)
    assert not differing(Eagle(head, top_k=2), head, lengths=(150, 33), rounds=3, budget=DraftBudget(3, 5))


class StateShifted(Eagle):
    """Reads the state of the column before."""

    def _catch_up(self, *given, **more):
        read, states = self._target.states.read, self._target.states
        states.read = lambda slot, begin, end, layers: (
            read(slot, max(0, begin - 1), end - 1, layers)
            if begin
            else torch.cat([read(slot, 0, 1, layers), read(slot, 0, end - 1, layers)])
        )
        try:
            return super()._catch_up(*given, **more)
        finally:
            states.read = read


class GapIgnored(Eagle):
    """Does not start over where it lacks more pairs than its window has."""

    def _first_uncached(self, seq):
        cache = self.layer.cache
        return cache.offsets[seq.slot] + cache.lengths[seq.slot] or super()._first_uncached(seq)


class NothingForgotten(Eagle):
    """The first row of a tree counts as digested."""

    def propose(self, seqs, budgets):
        made = super().propose(seqs, budgets)
        for seq in seqs:
            self.layer.cache.lengths[seq.slot] += 1
        return made


class TokenNotShifted(Eagle):
    """Pairs a state with its own token."""

    def _catch_up(self, *given, **more):
        extend_cache = self.layer.extend_cache
        other = lambda tokens: [[(t + 1) % 97 for t in row] for row in tokens]  # noqa: E731
        self.layer.extend_cache = lambda slots, ids, *rest, **more: extend_cache(slots, other(ids), *rest, **more)
        try:
            return super()._catch_up(*given, **more)
        finally:
            self.layer.extend_cache = extend_cache


def tree_too_far_right(places, starts, parents, *rest):
    positions, seen = places(starts, parents, *rest)
    return (positions if parents is None else positions + 1), seen


def tree_without_mask(places, starts, parents, *rest):
    positions, seen = places(starts, parents, *rest)
    return positions, (seen if parents is None else torch.ones_like(seen))


@DTYPES
@pytest.mark.parametrize("mutant", [StateShifted, NothingForgotten, TokenNotShifted])
def test_mutants_of_the_bookkeeping_are_caught(mutant, dtype):
    head = random_head(target(dtype), 3)
    assert differing(mutant(head), head)


@DTYPES
def test_a_mutant_of_the_window_is_caught(dtype):
    head = random_head(target(dtype), 3, window=3)
    assert not differing(Eagle(head), head, pause=5)
    assert differing(GapIgnored(head), head, pause=5)


def test_nothing_much_has_to_be_read_within_a_window():
    drafter, runner = Eagle(random_head(target(), 3, window=12)), ModelRunner(target(), 1)
    drafter.bind(runner, Coupled())
    text = prompt(40, 1)
    seq = sequence(target(), text, SamplingParams(max_tokens=50))
    seq.slot = runner.admit(text)
    assert drafter.draft_options(seq)[0].uncached_tokens == 12 - FEW


@DTYPES
@pytest.mark.parametrize("mutant", [NothingForgotten, MasksAsLong])
def test_mutants_of_peagle_are_caught(mutant, dtype):
    head = random_head(target(dtype), 3, **MASKS)
    assert differing(mutant(head), head)


@pytest.mark.parametrize("mutant", [tree_too_far_right, tree_without_mask])
def test_mutants_of_the_pass_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(draft_layer, "_positions_and_mask", partial(mutant, draft_layer._positions_and_mask))
    head = random_head(target(), 3)
    assert differing(Eagle(head), head)
    assert differing(Eagle(head), head, lengths=(9,), rounds=2)


# Native passes


class UnderOthers(EaglePass):
    """Nodes hang under the first of the level before."""

    def step(self, *level, **more):
        level = super().step(*level, **more)
        self._parents[:, self._newest :] = max(self._newest - 1, -1)
        return level


class ForgetsLevels(EaglePass):
    """Every level lies where the first one lay."""

    def step(self, *level, **more):
        self._parents = self._parents[:, :0]
        return super().step(*level, **more)


class PairsUnread(EaglePass):
    """Only the last pair is digested."""

    def extend_cache(self, slots, tokens, states, *rest):
        return super().extend_cache(slots, [row[-1:] for row in tokens], [known[-1:] for known in states], *rest)


def test_all_of_a_native_tree_is_right():
    head = random_head(target(torch.float32), 3)
    assert not differing(Eagle(head, top_k=3), head, budget=DraftBudget(4, 39), rounds=2)


@pytest.mark.parametrize("mutant", [UnderOthers, ForgetsLevels, PairsUnread])
def test_mutants_of_native_passes_are_caught(mutant, monkeypatch):
    monkeypatch.setattr(Eagle, "_pass", mutant)
    head = random_head(target(torch.float32), 3)
    assert differing(Eagle(head, top_k=3), head, budget=DraftBudget(4, 39), rounds=2)


# One draft


def bound(head, tree="dynamic", **options) -> tuple[Eagle, ModelRunner]:
    drafter, runner = Eagle(head, tree, **options), ModelRunner(target(), 2)
    drafter.bind(runner, Coupled())
    return drafter, runner


def drafted(budget: DraftBudget, ids=REPEATING, **options):
    """The first draft for a prompt: tokens, parents, confidences."""
    drafter, runner = bound(random_head(target(), 3), **options)
    seq = sequence(target(), list(ids), SamplingParams(max_tokens=50))
    seq.slot = runner.admit(ids)
    runner.extend_cache(seq.slot, ids[:-1])
    draft = drafter.propose([seq], [budget])
    return draft.tree.token_ids[0].tolist(), draft.tree.parents[0].tolist(), draft.confidence[0].tolist()


def test_budgets():
    tokens, parents, sure = drafted(DraftBudget(3, 9))
    assert len(tokens) == 10
    assert math.isnan(sure[0])
    assert len(drafted(DraftBudget(0, 0))[0]) == 1
    assert drafted(DraftBudget(4, 4), tree="chain")[1] == [-1, 0, 1, 2, 3]
    assert len(drafted(DraftBudget(4, 9, should_continue=lambda path: len(path) < 2), tree="chain")[0]) == 3
    assert len(drafted(DraftBudget(4, 9, min_probs=[1.1]))[0]) == 1
    paths = [sure[n] * (sure[parents[n]] if parents[n] else 1.0) for n in range(1, 10)]
    assert len(drafted(DraftBudget(2, 50, min_probs=[min(paths)]))[0]) >= len([p for p in paths if p >= min(paths)])
    assert set(tokens[1:]) <= set(random_head(target(), 3).draft_ids.tolist())


def test_a_text_of_one_token_has_no_pair():
    assert drafted(DraftBudget(3, 9), ids=[5])[0] == [5]
    drafter, _ = bound(random_head(target(), 1))
    seq = sequence(target(), [5], SamplingParams(), slot=0)
    assert drafter.draft_options(seq)[0].hint < 0


def test_draft_options_count_uncached_tokens():
    drafter, runner = bound(random_head(target(), 3), top_k=5)
    ids = prompt(40)
    seq = sequence(target(), ids, SamplingParams())
    seq.slot = runner.admit(ids)
    runner.extend_cache(seq.slot, ids[:-1])
    look = drafter.draft_options(seq)[0]
    assert (look.source, look.hint, look.uncached_tokens, look.branches) == ("eagle3", 0, 39 - 8, 5)
    drafter.propose([seq], [WIDE])
    assert drafter.draft_options(seq)[0].uncached_tokens == 0
    drafter.release([seq.slot])
    assert drafter.draft_options(seq)[0].uncached_tokens == 39 - 8


@pytest.mark.parametrize("version", [1, 3, "mtp"])
def test_seconds_disturb_nothing(version):
    drafter, _ = bound(random_head(target(), version))
    drafter.layer.cache.lengths[0] = 7
    ((source, (token, uncached_tokens)),) = drafter.seconds().items()
    assert source == {1: "eagle", 3: "eagle3", "mtp": "mtp"}[version]
    assert token > 0
    assert uncached_tokens > 0
    assert drafter.layer.cache.lengths[0] == 7


def test_a_head_of_another_target_is_refused():
    runner = ModelRunner(target(), 1)
    for change in ({"hidden_size": 16}, {"vocab_size": 99}):
        other = loaded("llama", torch.float64, **change)
        with pytest.raises(IncompatibleModels, match="another target"):
            Eagle(random_head(other, 3)).bind(runner, Coupled())
    deep = random_head(loaded("llama", torch.float64, num_hidden_layers=3), 3)
    with pytest.raises(IncompatibleModels, match="states 3"):
        Eagle(deep).bind(runner, Coupled())


def test_the_given_head_stays_as_it_is():
    head = random_head(target(), 3).float()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    drafter, _ = bound(head)
    assert drafter.layer.head.draft_ids.dtype == torch.long
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.dtype == before[name].dtype
