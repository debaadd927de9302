"""The search of skipped sub-layers, against every subset of small models."""

from itertools import chain, combinations

import pytest
import torch

from paceline import LLM, SelfSkip
from paceline.core.tree import TokenTree
from paceline.methods.self_skip import drafter as drafter_file
from paceline.methods.self_skip import search as search_file
from paceline.methods.self_skip.search import MOST, Choice, best_rate, choices, chosen, frontier, search
from paceline.methods.self_skip.skips import Skips, leave_out
from paceline.target import ModelRunner
from paceline.target.sublayers import Seconds, Sublayers, continued
from tests.helpers import loaded, prompt
from tests.tiny import tiny_model

TEXT = prompt(30)
LENGTHS = (5, 12, 25)


def cached(target) -> tuple[Sublayers, ModelRunner, list[int], list[list[int]]]:
    """Chains of three tokens behind beginnings of a text."""
    on = ModelRunner(target, len(LENGTHS))
    slots = [on.cache.allocate() for _ in LENGTHS]
    for slot, length in zip(slots, LENGTHS, strict=True):
        on.extend_cache(slot, TEXT[:length])
    chains = [TEXT[length : length + 3] for length in LENGTHS]
    return Sublayers(on, slots, chains), on, slots, chains


def run_without(parts, skipped) -> torch.Tensor:
    rows = parts.embedded()
    for index in range(parts.count):
        rows = rows if index in skipped else parts.run(index, rows)
    return rows


def subsets(count: int) -> list[tuple[int, ...]]:
    return [*chain.from_iterable(combinations(range(count), size) for size in range(count + 1))]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "deepseek_v3"])
def test_sublayers_have_the_bits_of_a_pass(name):
    parts, on, slots, chains = cached(loaded(name))
    for skipped in ((), (0,), (1, 2), (0, 1, 2, 3)):
        draft = on.sharing_cache(lambda model, skipped=skipped: leave_out(model, Skips.of(skipped)))
        expected = draft.forward(slots, TokenTree.chain(chains))
        assert torch.equal(parts.logits(run_without(parts, skipped)), expected)


def test_chains_are_what_the_target_says():
    parts = continued(loaded(), [prompt(9), prompt(4, 1)], 9, 3, 3)
    said = parts.logits(run_without(parts, ())).argmax(-1)
    assert [one[1:] for one in parts.chains] == said[:, :-1].tolist()
    assert len(parts.chains) == 2 * 3


class Toy:
    """Sub-layers that add vectors, shifted by what they read."""

    count = 8

    def __init__(self, seed: int):
        make = torch.Generator().manual_seed(seed)
        self.adds = torch.randn(self.count, 1, 1, 12, generator=make) * torch.rand(self.count, 1, 1, 1, generator=make)
        self.first, self.head = torch.randn(1, 6, 12, generator=make), torch.randn(12, 20, generator=make)

    def embedded(self):
        return self.first

    def run(self, index, rows):
        return rows + self.adds[index] + 0.1 * rows.roll(1, -1)

    def logits(self, rows):
        return rows @ self.head


SECONDS = [0.2, 0.4, 0.2, 0.3, 0.2, 0.4, 0.2, 0.3]


def likenesses(parts, sets) -> dict[tuple[int, ...], tuple[float, float]]:
    true = run_without(parts, ())
    each = {held: torch.cosine_similarity(run_without(parts, held), true, dim=-1).mean().item() for held in sets}
    return {held: (sum(SECONDS[i] for i in held), likeness) for held, likeness in each.items()}


@pytest.mark.parametrize("seed", range(4))
def test_the_frontier_is_near_that_of_all_subsets(seed):
    toy = Toy(seed)
    every, cells = likenesses(toy, subsets(toy.count)), frontier(toy, SECONDS)
    assert cells[0].skipped == ()
    assert len(cells) > 6
    behind = []
    for cell in cells:
        saved, likeness = every[cell.skipped]
        assert saved == pytest.approx(cell.saved)
        assert saved <= MOST * sum(SECONDS) + 1e-9
        assert cell.likeness == pytest.approx(likeness, abs=1e-5)
        assert torch.equal(cell.rows, run_without(toy, cell.skipped))
        best = max(other for time, other in every.values() if time >= saved - 1e-9)
        behind.append(best - likeness)
    assert max(behind) < 0.1
    assert sum(behind) / len(behind) < 0.02


def test_sets_of_a_model_against_all_subsets():
    parts = cached(loaded("llama", num_hidden_layers=3))[0]
    seconds = Seconds([1.0, 2.0] * 3, 1.0, [10.0, 11.0, 12.0])
    found = choices(parts, frontier(parts, seconds.parts), seconds)
    target = parts.logits(run_without(parts, ())).argmax(-1)
    rates = {}
    for held in subsets(6):
        agreement = (parts.logits(run_without(parts, held)).argmax(-1) == target).float().mean().item()
        rates[Skips.of(held)] = best_rate(agreement, 10.0 - sum(seconds.parts[i] for i in held), seconds.passes)[0]
    for choice in found:
        assert choice.speedup == pytest.approx(10 * rates[choice.skips])
    assert max(choice.speedup for choice in found) > 0.9 * 10 * max(rates.values())


def test_a_smaller_vocabulary_is_tried(monkeypatch):
    toy, seconds = Toy(0), Seconds(SECONDS, 0.5, [5.0, 5.5, 6.0])
    monkeypatch.setattr(search_file, "FIRST", 10)
    cells = frontier(toy, SECONDS)
    pairs = choices(toy, cells, seconds)
    assert [choice.skips.vocabulary for choice in pairs] == [None, 10] * len(cells)
    for cell, whole, small in zip(cells, pairs[::2], pairs[1::2], strict=True):
        target, logits = toy.logits(cells[0].rows).argmax(-1), toy.logits(cell.rows)
        assert small.saved == pytest.approx(whole.saved + 0.5 * 0.5 / (sum(SECONDS) + 0.5))
        assert small.agreement == pytest.approx((logits[..., :10].argmax(-1) == target).float().mean().item())


def test_states_of_another_set_are_seen(monkeypatch):
    """A cell whose states are the target's would call every set perfect."""
    monkeypatch.setattr(Toy, "run", lambda self, index, rows: self.first + self.adds[: index + 1].sum(0))
    with pytest.raises(AssertionError):
        test_the_frontier_is_near_that_of_all_subsets(0)


def test_rates():
    assert best_rate(1.0, 0.0, [1.0, 1.0, 1.0]) == (3.0, 2)
    rate, depth = best_rate(0.5, 0.5, [1.0, 1.2, 1.4])
    assert (rate, depth) == (pytest.approx(1.5 / 1.7), 1)
    some = [
        Choice(Skips((), tuple(range(n))), a, n / 10, s, 1) for n, a, s in ((0, 1, 1), (3, 0.8, 1.1), (5, 0.4, 0.9))
    ]
    assert [chosen(some, f).saved for f in (None, 0.2, 0.4, 0.9)] == [0.3, 0.3, 0.5, 0.5]


def test_a_choice_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(search_file, "LENGTH", 9)
    made = []
    monkeypatch.setattr(drafter_file, "search", lambda *about: made.append(about) or search(*about))
    drafters = [SelfSkip(), SelfSkip(), SelfSkip(fraction=0.3)]
    for drafter in drafters:
        LLM(tiny_model("llama"), drafter=drafter)
    assert len(made) == 2
    assert drafters[0].skips == drafters[1].skips != Skips()
    assert len([*(tmp_path / "skips").iterdir()]) == 2
