"""How long answers get, and whether drafting for one is worth it."""

import pytest

from paceline.policy.constants import REMEMBERED
from paceline.policy.lengths import Lengths
from tests.policy.simulator import Member, model, simulate


def taught(*tokens: int, was_cut: bool = False) -> Lengths:
    made = Lengths()
    for one in tokens:
        made.add(one, was_cut)
    return made


def test_the_mean_of_what_longer_answers_had_to_come():
    lengths = taught(2, 2, 60, 80)
    assert lengths.left(0, 1000) == pytest.approx(36, abs=2)
    assert lengths.left(2, 1000) == pytest.approx(68, abs=10)
    assert lengths.left(2, 30) == 30


def test_while_few_are_known_half_of_what_may_come_is_guessed():
    assert taught().left(0, 1000) == 500
    assert taught(4).left(0, 1000) > taught(4, 4).left(0, 1000) > taught(4, 4, 4, 4).left(0, 1000) > 4
    assert taught(4, 4, 4).left(5, 1000) == 500


def test_only_the_last_ones_count():
    assert taught(*[90] * 50, *[3] * REMEMBERED).left(0, 2000) < 4


def test_an_answer_that_was_cut_might_have_gone_on():
    assert taught(*[16] * 20, was_cut=True).left(1, 1000) == pytest.approx(31, abs=1)


def test_a_good_draft_of_a_short_answer_is_left_alone():
    """As accurate as can be, without anything to read, a quarter of a pass a token: in answers of one it is lost."""
    member = Member("m", lambda *_: 0.99, 0.003)
    assert simulate(model, [member], requests=150, tokens=128, length=lambda request: 1).speed > 0.985


def short_answers(kinds: tuple[int, ...], chance: float, seed: int) -> float:
    """Speed of the default policy: answers of these lengths in turns, far below their limit, behind prompts whose
    reading takes a draft model 1.2 passes."""
    member = Member("m", lambda *_: chance, 0.0012, 0.012 / 100, reads=True)
    told = simulate(
        model, [member], requests=60, tokens=128, seed=seed, length=lambda request: kinds[request % len(kinds)]
    )
    return told.speed


CASES = [((2,), 0.3, 0.97), ((2,), 0.6, 0.97), ((3,), 0.4, 0.97), ((40,), 0.8, 1.4), ((2, 2, 60), 0.8, 1.3)]


@pytest.mark.parametrize(("kinds", "chance", "least"), CASES)
def test_short_answers_are_left_alone(kinds, chance, least):
    speeds = sorted(short_answers(kinds, chance, seed) for seed in range(3))
    assert speeds[1] >= least, speeds


def test_without_lengths_short_answers_pay(monkeypatch):
    """The mutant: half of the limit, as long as an answer may be, is what reading is spread over."""
    monkeypatch.setattr(Lengths, "left", lambda self, emitted, limit: max(1.0, limit / 2))
    assert max(short_answers(*CASES[0][:2], seed) for seed in range(3)) < CASES[0][2] + 0.005
