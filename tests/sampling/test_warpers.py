"""Temperature, top-k, top-p and min-p on large vocabularies."""

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from paceline.core.request import SamplingParams
from paceline.sampling import warpers as warpers_module
from paceline.sampling.distribution import target_distribution
from paceline.sampling.warpers import warp
from tests.sampling.helpers import V, hf_warpers, root_only, sequence

SPREADS = {"flat": 0.3, "usual": 2.0, "peaked": 6.0, "constant": 0.0}


def test_a_top_k_beyond_every_vocabulary_is_none():
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(warp(scores, [SamplingParams(temperature=1.0, top_k=10**400)] * 2), scores)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 700},
        {"top_k": 5000},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.7},
        {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
def test_truncation_matches_transformers(options: dict, spread: float, ties: bool) -> None:
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(3, 3000, generator=g) * spread
    scores[2, 100:] = -torch.inf  # fewer tokens allowed than a window holds
    if ties:
        scores = (scores * 4).round() / 4
    params = SamplingParams(temperature=1.0, **options)
    got = warp(scores, [params] * 3)
    want = hf.LogitsProcessorList(hf_warpers(params))(torch.zeros(3, 1, dtype=torch.long), scores.double())
    if spread == 0.0 and "top_p" in options:  # equal scores: where rounding puts the boundary is anyone's choice
        assert ((got > -torch.inf).sum(1) - (want > -torch.inf).sum(1)).abs().max() <= 1
        return
    kept = got > -torch.inf
    assert torch.equal(got[kept], scores[kept])
    assert bool(kept.any(-1).all())
    if not ties:
        assert torch.equal(kept, want > -torch.inf)
        return
    # transformers cuts between equal scores in the order of an unstable sort: the scores kept are the same
    for ours, theirs in zip(got.double(), want, strict=True):
        ours, theirs = (row[row > -torch.inf].sort(descending=True).values for row in (ours, theirs))
        both = min(len(ours), len(theirs))
        # Sums of probabilities are rounded in another order on other processors, which may move the border by a token.
        assert abs(len(ours) - len(theirs)) <= ("top_p" in options)
        assert torch.equal(ours[:both], theirs[:both])
    for row, keep in zip(scores, kept, strict=True):
        tied = (row == row[keep].min()).nonzero()[:, 0]
        assert keep[tied].int().diff().le(0).all(), "of equal scores the lower token ids are kept"


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_the_windows_do_not_change_the_nucleus(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(3)
    spreads = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]).unsqueeze(1)
    scores = ((torch.randn(6, 12_000, generator=g) * spreads) * 32).round() / 32  # rows that stop at every window
    params = [SamplingParams(temperature=1.0, top_p=top_p)] * 6
    widths: list[int] = []
    window = warpers_module._window

    def spy(part: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        widths.append(width)
        return window(part, width)

    monkeypatch.setattr(warpers_module, "_window", spy)
    got = warp(scores, params)
    assert widths[0] == 128
    assert (12_000 in widths) == (top_p > 0.5), "the full sort is for broad nuclei only"
    monkeypatch.setattr(warpers_module, "_WINDOWS", ())
    assert torch.equal(got, warp(scores, params))


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda values, tokens, mass: (values, tokens, mass), True),
        (lambda values, tokens, mass: (values, tokens, mass * 0.97), False),
        (lambda values, tokens, mass: (values, tokens.roll(1, 1), mass), False),
        (lambda values, tokens, mass: (values, tokens, mass.roll(1, 1)), False),
    ],
    ids=["none", "mass that is lost", "tokens of the place before", "mass of the place before"],
)
def test_faults_of_the_first_window_are_seen(change, is_same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the native library on CPU; the full sort comes from torch."""
    scores = torch.randn(8, 12_000, generator=torch.Generator().manual_seed(4)) * 6
    params = [SamplingParams(temperature=1.0, top_p=0.8)] * 8
    window = warpers_module._window
    monkeypatch.setattr(
        warpers_module, "_window", lambda s, width: change(*window(s, width)) if width == 128 else window(s, width)
    )
    got = warp(scores, params)
    monkeypatch.setattr(warpers_module, "_WINDOWS", ())
    assert torch.equal(got, warp(scores, params)) == is_same


def test_the_smallest_temperature_is_the_argmax() -> None:
    seq = sequence(SamplingParams(temperature=1e-300, top_p=0.9), [1])
    logits = torch.randn(1, 1, V)
    assert int(target_distribution(logits, [seq], root_only(seq)).at([0], [0]).argmax()) == int(logits.argmax())
