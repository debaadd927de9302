"""Adapters from hell: whatever their weights, the answer is plain decoding's, and what they spoil are their drafts."""

from functools import cache

import pytest
import torch

from paceline import SamplingParams
from paceline.core.tree import TokenTree
from paceline.errors import DraftError, NumericsError
from paceline.methods import Space
from paceline.methods.space.adapter import SpaceAdapter
from paceline.target import LoadedModel, ModelRunner, adapters, corrections, make_runner
from tests.helpers import REPEATING, VOCAB, assert_sound, loaded, on_torch, oracle, prompt, result, run, sequence
from tests.methods.space.common import adapter
from tests.tiny import tiny_model

NAN, INF = float("nan"), float("inf")
VALUES = [NAN, INF, 3e38]
PLACES = {
    "llama": ("k_proj.b", "v_proj.b", "q_proj.b", ".b", "masks", "transition_out"),
    "gpt_neox": ("query_key_value.b", ".b", "masks"),
}
NATIVE = [("llama", True, 2)]
RUNNERS = [("torch llama", False, 1), ("torch llama", True, 2), ("gpt_neox", False, 2)]
"""Architecture, invariant numerics, slots: the masks of one sequence are neighbours, those of two are not."""
CASES = [(*on, place) for on in RUNNERS for place in PLACES[on[0].split()[-1]]]
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=1.0, max_tokens=8, top_p=0.8, top_k=7),
)


@cache
def target(name: str) -> LoadedModel:
    return on_torch(tiny_model(name.split()[1])) if name.startswith("torch ") else loaded(name)


@cache
def runner(name: str, invariant: bool, slots: int) -> ModelRunner:
    return make_runner(target(name), slots, invariant=invariant)


@cache
def answers(name: str):
    return [result(oracle(target(name), REPEATING, params)) for params in PARAMS]


def bound_by(monkeypatch: pytest.MonkeyPatch, bounded) -> None:
    """Embeddings and corrections of masks go through this function."""
    for module in (adapters, corrections):
        monkeypatch.setattr(module, "bounded", bounded)


def broken(name: str, place: str, value: float) -> SpaceAdapter:
    """With weights of this size, of either sign, or with this weight only where it is no number or infinite."""
    kind = name.split()[-1]
    made = adapter(kind, num_masks=3, transition_rank=2 if kind == "llama" else 0)
    found = [p for key, p in made.named_parameters() if key.endswith(place)]
    assert found
    for parameter in found:
        parameter.mul_(value) if abs(value) < INF else parameter.fill_(value)
    return made


def same_answers(name: str, invariant: bool, slots: int, given: SpaceAdapter) -> bool:
    on = runner(name, invariant, slots)
    on.loaded = target(name)  # takes off what another test put on
    seqs = [sequence(on.loaded, REPEATING, params) for params in PARAMS]
    run(on, Space(given, 2), seqs, 3, 5)
    for seq in seqs:
        assert_sound(seq, 3)
        assert sum(r.num_rows for r in seq.rounds) > 2 * len(seq.rounds)  # masks were hung
    return [result(seq) for seq in seqs] == answers(name)


@pytest.mark.diagonal
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{'invariant' if c[1] else 'fast'}-{c[3]}")
def test_answers_stay(case, value):
    *on, place = case
    assert same_answers(*on, broken(on[0], place, value))


@pytest.mark.parametrize("on", RUNNERS, ids=str)
def test_keys_without_a_bound_are_noticed(on, monkeypatch):
    """The score of such a key is infinite, and inf - inf hides no mask."""
    place = "query_key_value.b" if on[0] == "gpt_neox" else "k_proj.b"
    bound_by(monkeypatch, lambda rows: rows)
    with pytest.raises(NumericsError):
        same_answers(*on, broken(on[0], place, 3e38))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("on", NATIVE, ids=str)
def test_native_rows_need_no_bound(on, value, monkeypatch):
    """They do not read what is hidden from them."""
    bound_by(monkeypatch, lambda rows: rows)
    for place in PLACES["llama"]:
        assert same_answers(*on, broken(on[0], place, value))


def test_only_such_factors_are_watched(monkeypatch):
    """A sound adapter costs no further operation at its layers."""
    seen = []
    right = corrections.bounded
    bound_by(monkeypatch, lambda rows: seen.append(rows.shape) or right(rows))
    on = ModelRunner(target("torch llama"), 1)
    on.attach_adapter(adapter(num_masks=3))
    slot = on.admit(prompt(5))
    tree = TokenTree.from_lists([[5, VOCAB]], [[-1, 0]], probes=[[False, True]])
    on.forward([slot], tree)
    assert seen == [(1, 32)]  # the embedding
    on.loaded = target("torch llama")
    on.attach_adapter(broken("llama", "k_proj.b", 3e38))
    on.forward([slot], tree)
    assert seen == [(1, 32)] * 2 + [(1, 16)] * 2  # and k of two layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bounds(dtype):
    most = float(torch.finfo(dtype).max)
    rows = torch.tensor([NAN, INF, -INF, most, -most, 3.5, 0.0], dtype=dtype)
    held = corrections.bounded(rows.clone())
    assert held.isfinite().all()
    assert held[0] == 0
    assert held[5:].tolist() == [3.5, 0.0]
    limit = float(held.abs().max())
    assert limit >= 1000
    assert 16 * limit < most  # what is hidden by the lowest number, not by -inf, stays hidden


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("past", [0, 5])
def test_masks_that_are_none_are_refused(shared, past):
    on = ModelRunner(loaded(), 1)
    on.attach_adapter(adapter(num_masks=3, shared_mask=shared))
    slot = on.admit(prompt(5))
    on.extend_cache(slot, prompt(5))
    tree = TokenTree.from_lists([[5, VOCAB + 3 + past]], [[-1, 0]], probes=[[False, True]])
    with pytest.raises(DraftError, match=f"token {VOCAB + 3 + past}"):
        on.forward([slot], tree)
    assert on.loaded.attached.rows is None
