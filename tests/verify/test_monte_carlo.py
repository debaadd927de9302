"""Three tokens with the real counter-based noise: what enumeration cannot see is how the numbers are wired.

Chi-square of the loop's output against the exact product distribution, at a false-alarm probability of 1e-6 a test.
"""

from functools import cache

import pytest
import torch
from drafted_trees import Drafted, draw_tree, emitted, tensors
from mutants import RULES, Rule
from statistics_of import FALSE_ALARM, chi_square_p
from toy_distributions import path_distribution, product_distribution

from paceline.core import rng
from paceline.core.draft import Law
from paceline.core.rng import Purpose, inverse_cdf
from paceline.verify import Ratio, rejection
from paceline.verify.rejection import Chance, Keyed, Real, Vector

pytestmark = pytest.mark.usefixtures("unchecked_types")  # thousands of walks
P, Q = cache(path_distribution(12, 3, zeros=0)), cache(path_distribution(21, 3, zeros=0))
LENGTH, SAMPLES = 3, 300
R4, R5 = (RULES[name][0] for name in ("R4 siblings i.i.d.", "R5 siblings without replacement"))


class Drafting(Chance):
    """A drafter's noise: its own stream, keyed by position; a fresh number for each draw of a position."""

    def __init__(self, seed: int, start: int, width: int):
        positions = torch.arange(start, start + LENGTH)[None]
        self.numbers = rng.uniforms(torch.tensor([seed]), positions, Purpose.DRAFT, width * width)[0]
        self.width, self.drawn = width, 0

    def coin(self, probability: Real) -> bool:
        raise AssertionError("drafters toss no coins")

    def draw(self, weights: Vector) -> int:  # a chain draws one number a level; a tree `width` at the root, then on
        level, index = (self.drawn, 0) if self.width == 1 else divmod(self.drawn, self.width)
        self.drawn += 1
        return int(inverse_cdf(torch.tensor(weights.astype(float)), self.numbers[level, index : index + 1]))


def sample(law: Law, rule: Rule, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every seed's first tokens, all rows verified in one batch per round."""
    texts: list[tuple[int, ...]] = [()] * SAMPLES
    while rows := [row for row, text in enumerate(texts) if len(text) < LENGTH]:
        drafts: list[Drafted] = []
        for row in rows:
            noise = Drafting(row, 1 + len(texts[row]), shape[0])
            drafts.append(draw_tree(rule, Q, shape, texts[row], noise))
        draft, target = tensors(drafts, P, Q, law)
        walks = Ratio().verify(draft, target, rows, [1 + len(texts[row]) for row in rows])
        for row, drafted, (path, token, _) in zip(rows, drafts, walks, strict=True):
            texts[row] += emitted(drafted, path, token)
    return [text[:LENGTH] for text in texts]


@pytest.mark.parametrize(
    ("law", "rule", "shape"),
    [(Law.IID, R4, (2, 1)), (Law.WITHOUT_REPLACEMENT, R5, (2, 1)), (Law.POINT_MASS, R4, (2, 1))],
)
def test_ratio_loop_samples_the_product(law: Law, rule: Rule, shape: tuple[int, ...]) -> None:
    assert chi_square_p(sample(law, rule, shape), product_distribution(P, LENGTH)) > FALSE_ALARM


def _shared_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The acceptance test reads the numbers its token was drawn with."""

    def numbers(seeds, positions, purpose, count):
        return rng.uniforms(seeds, positions, Purpose.DRAFT if purpose is Purpose.ACCEPT else purpose, count)

    monkeypatch.setattr(rejection, "uniforms", numbers)


def _one_number_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings, and the recovered token, decided by one and the same number."""

    def numbers(seeds, positions, purpose, count):
        return rng.uniforms(seeds, positions, Purpose.ACCEPT, 1).expand(-1, -1, count)

    monkeypatch.setattr(rejection, "uniforms", numbers)


def _one_position_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by the round's start, not by the token's own position."""

    def numbers(seeds, positions, purpose, count):
        return rng.uniforms(seeds, torch.ones_like(positions), purpose, count)

    monkeypatch.setattr(rejection, "uniforms", numbers)


@pytest.mark.parametrize("mutate", [_shared_stream, _one_position_for_all])
def test_wrongly_wired_noise_is_caught(monkeypatch, mutate) -> None:
    mutate(monkeypatch)
    assert chi_square_p(sample(Law.IID, R4, (2, 1)), product_distribution(P, LENGTH)) < FALSE_ALARM


def numbers_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[tuple[int, int, Purpose], list[float]], list[int]]:
    """Every number that 40 rows read in one round, by (seed, position, purpose); and how many tokens each accepted."""
    read: dict[tuple[int, int, Purpose], list[float]] = {}
    real = rejection.uniforms

    def numbers(seeds, positions, purpose, count):
        found = real(seeds, positions, purpose, count)
        read.setdefault((int(seeds), int(positions), purpose), []).extend(found.flatten().tolist())
        return found

    monkeypatch.setattr(rejection, "uniforms", numbers)
    drafts = [draw_tree(R4, Q, (3, 2), (), Drafting(row, 1, 3)) for row in range(40)]
    draft, target = tensors(drafts, P, Q, Law.IID)
    walks = Ratio().verify(draft, target, range(40), [9] * 40)
    return read, [len(walk.path) for walk in walks]


def test_numbers_belong_to_the_position_they_decide(monkeypatch) -> None:
    """One per sibling at every visited position, one to recover at the last, and no number twice."""
    read, accepted = numbers_of_a_round(monkeypatch)
    due: dict[tuple[int, int, Purpose], int] = {}
    for row, depth in enumerate(accepted):
        due |= {(row, 9 + level, Purpose.ACCEPT): (3, 2)[level] for level in range(min(depth + 1, 2))}
        due[row, 9 + depth, Purpose.RECOVER] = 1
    assert {key: len(found) for key, found in read.items()} == due
    everything = [number for found in read.values() for number in found]
    assert len(set(everything)) == len(everything)


def test_one_number_for_all_siblings_is_caught(monkeypatch) -> None:
    _one_number_for_all(monkeypatch)
    read, _ = numbers_of_a_round(monkeypatch)
    everything = [number for found in read.values() for number in found]
    assert len(set(everything)) < len(everything)


def test_inverse_cdf_at_its_breakpoints() -> None:
    """Exactly the intervals (0, .25], (.25, .75], (.75, 1]; a token of weight zero is never drawn, not even at 1."""
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    points = {2.0**-54: 1, 0.25: 1, 0.25 + 2.0**-54: 3, 0.75: 3, 0.75 + 2.0**-53: 4, 1.0: 4}
    drawn = inverse_cdf(weights.expand(len(points), -1), torch.tensor([*points], dtype=torch.float64).unsqueeze(1))
    assert drawn.tolist() == [*points.values()]


def test_certain_and_impossible_tokens() -> None:
    for position in range(200):
        noise = Keyed(3, position, 2)
        assert noise.coin(1.0)
        assert not noise.coin(0.0)
