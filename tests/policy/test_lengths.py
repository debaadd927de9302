"""How long answers get, and whether reading for one is worth it."""

import random

import pytest

from paceline import CostModel
from paceline.policy.lengths import ENOUGH, LONGEST_WAIT, REMEMBERED, Lengths
from tests.policy.simulator import Member, simulate


def known(*tokens: int) -> Lengths:
    made = Lengths()
    for one in tokens:
        made.add(one)
    return made


def test_a_guess_gives_way():
    """Half of the limit at first; after a few answers what they say."""
    expected = [known(*[2] * count).left(0, 128) for count in (0, 1, 2, 6)]
    assert expected[0] == 64
    assert expected[1] == pytest.approx((2 + 0.25 * 64) / 1.25)
    assert expected == sorted(expected, reverse=True)
    assert expected[3] < 3.3


def test_what_is_left_depends_on_what_was_said():
    """Two of three answers end with the second token: who gets beyond is one of the long ones."""
    lengths = known(*[2, 2, 40] * 10)
    assert lengths.left(0, 1000) == pytest.approx(44 / 3, rel=0.05)
    assert lengths.left(2, 1000) == pytest.approx(38, rel=0.1)
    assert lengths.left(2, 10) == 10
    assert lengths.left(50, 20) == 10  # nobody got so far: the guess


def test_only_the_last_ones_count():
    assert known(*[900] * 50, *[3] * REMEMBERED).left(0, 2000) < 4


def test_drafted_tokens_behind_the_end_do_not_count():
    assert known().goes_on(0, 3) == [1.0, 1.0, 1.0]
    lengths = known(*[2] * 20, *[40] * 20)
    assert lengths.goes_on(0, 3) == pytest.approx([1.0, 0.5, 1.0], abs=0.01)  # the first counts in both
    assert lengths.goes_on(1, 2) == pytest.approx([0.5, 1.0], abs=0.01)
    assert known(*[2] * 20).goes_on(1, 2)[0] < 0.01


@pytest.mark.usefixtures("unchecked_types")
def test_a_good_draft_of_a_short_answer_is_left_alone():
    """As accurate as can be, without anything to read, a quarter of a pass a token: in answers of one it is lost."""

    def speed() -> float:
        member = Member("m", lambda *_: 0.99, 0.003)
        return simulate(
            lambda clock: CostModel(clock=clock), [member], requests=150, tokens=128, length=lambda request: 1
        ).speed

    assert speed() > 0.985


def best_wait(seen: list[int], emitted: int, gain: float, price: float) -> int:
    """By trying every wait on every answer: what it saves and costs, token by token."""

    def saved(wait: int, length: int) -> float:
        total = 0.0
        for token in range(emitted, length):
            if token - emitted == wait:
                total -= price
            total += gain * (token - emitted >= wait)
        return total

    return max(range(LONGEST_WAIT + 1), key=lambda wait: (round(sum(saved(wait, n) for n in seen), 9), -wait))


def test_waiting_is_what_trying_every_wait_finds():
    rng = random.Random(0)
    for _ in range(300):
        seen = [rng.choice((1, 2, 3, 9, 30)) for _ in range(rng.randint(ENOUGH, 20))]
        emitted, gain, price = rng.randint(0, 4), rng.random(), rng.uniform(0, 4)
        if sum(n > emitted for n in seen) < ENOUGH:
            continue
        waits = best_wait(seen, emitted, gain, price) > 0
        assert known(*seen).had_better_wait(emitted, gain, price) == waits


def test_few_answers_say_nothing_of_waiting():
    assert not known(2, 2, 40).had_better_wait(0, 0.1, 3.0)
    assert known(2, 2, 2, 40).had_better_wait(0, 0.1, 3.0)


def short_answers(kinds: tuple[int, ...], chance: float, seed: int) -> float:
    """Speed of the default policy: answers of these lengths in turns, far below their limit, behind prompts whose
    reading takes a draft model 1.2 passes."""
    member = Member("m", lambda *_: chance, 0.0012, 0.012 / 100, reads=True)
    told = simulate(
        lambda clock: CostModel(clock=clock),
        [member],
        requests=60,
        tokens=128,
        seed=seed,
        length=lambda request: kinds[request % len(kinds)],
    )
    return told.speed


CASES = [((2,), 0.3, 0.98), ((2,), 0.6, 0.98), ((3,), 0.4, 0.97), ((40,), 0.8, 1.4), ((2, 2, 60), 0.8, 1.4)]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("kinds", "chance", "least"), CASES)
def test_short_answers_are_left_alone(kinds, chance, least):
    speeds = sorted(short_answers(kinds, chance, seed) for seed in range(5))
    assert speeds[2] >= least, speeds


@pytest.mark.usefixtures("unchecked_types")
def test_without_lengths_short_answers_pay(monkeypatch):
    """The mutant: half of the limit, as long as an answer may be, is what reading is spread over."""
    monkeypatch.setattr(Lengths, "left", lambda self, emitted, limit: max(1.0, limit / 2))
    monkeypatch.setattr(Lengths, "had_better_wait", lambda *_: False)
    kinds, chance, least = CASES[0]
    assert max(short_answers(kinds, chance, seed) for seed in range(5)) < least
