"""How long answers get, and whether reading for one is worth it."""

import random

import pytest

from paceline import SamplingParams
from paceline.core.request import Sequence
from paceline.core.round import Origin
from paceline.policy.lengths import ENOUGH, LONGEST_WAIT, REMEMBERED, Ends, Lengths
from tests.policy.simulator import Member, model, simulate


def known(*tokens: int) -> Ends:
    return Ends((1.0, one) for one in tokens)


def answer(asked: list[int], said: list[int], slot: int = 0) -> Sequence:
    seq = Sequence([1, 1, *asked], SamplingParams(max_tokens=1000), 0, frozenset(), 10**6, slot=slot)
    for token in said:
        seq.append(token, Origin.DRAFTED, "")
    return seq


IS_THERE, DESCRIBE = [10, 11], [20, 21, 22]


def taught(*pairs: tuple[list[int], list[int]]) -> Lengths:
    made = Lengths()
    for asked, said in pairs:
        made.add(answer(asked, said))
    return made


def test_only_the_last_ones_count():
    lengths = taught(*[(DESCRIBE, [5] * 90)] * 50, *[(DESCRIBE, [5] * 3)] * REMEMBERED)
    assert lengths.of(answer(DESCRIBE, [])).left(0, 2000) < 4


def test_weights_are_shares():
    """Sums from each length on are what summing over every answer gives, and weights count as they compare."""
    rng = random.Random(1)
    for _ in range(200):
        answers = [(rng.choice((0.1, 1.0, 3.0)), rng.randint(0, 12)) for _ in range(rng.randint(0, 9))]
        emitted, limit, ends = rng.randint(0, 12), rng.randint(1, 60), Ends(answers)
        longer = [(weight, tokens - emitted) for weight, tokens in answers if tokens > emitted]
        total, n = sum(weight for weight, _ in longer), len(longer)
        guess = 1 / (1 + n) ** 3
        mean = sum(n * weight / total * left for weight, left in longer) + guess * limit / 2
        assert ends.left(emitted, limit) == pytest.approx(max(1.0, min(mean / (n + guess), limit)))
        reach = [guess + sum(n * weight / total for weight, left in longer if left > i) for i in range(5)]
        assert ends.continue_probs(emitted, 4) == pytest.approx([reach[i + 1] / reach[i] for i in range(4)])
        tripled = Ends((3 * weight, tokens) for weight, tokens in answers)
        assert tripled.left(emitted, limit) == pytest.approx(ends.left(emitted, limit))


BOTH = [(IS_THERE, [7, 2]), (DESCRIBE, [8] * 30)] * 6


def test_a_question_tells_the_length():
    lengths = taught(*BOTH)
    assert lengths.of(answer([10, 12], [])).left(0, 1000) < 4
    assert lengths.of(answer([20, 21, 29], [], slot=1)).left(0, 1000) > 25
    assert 10 < lengths.of(answer([90, 91], [], slot=2)).left(0, 1000) < 20  # like none: all speak


def test_a_first_token_tells_the_length():
    """The same question, answered in one word or in thirty: the first token shows which."""
    lengths = taught(*[(DESCRIBE, [7, 2]), (DESCRIBE, [8] * 30)] * 6)
    seq = answer(DESCRIBE, [])
    assert lengths.of(seq).left(0, 1000) > 10
    seq.append(7, Origin.DRAFTED, "")
    assert lengths.of(seq).left(1, 1000) < 3


def test_who_outlives_those_like_it_is_like_the_others(monkeypatch):
    seq = answer(IS_THERE, [7, 9])
    assert taught(*BOTH).of(seq).left(2, 1000) == pytest.approx(28, abs=2)
    monkeypatch.setattr("paceline.policy.lengths.OTHERS", 0.0)  # the mutant
    assert taught(*BOTH).of(seq).left(2, 1000) == 500


def test_who_outlives_all_that_was_known_is_looked_up_again():
    lengths = taught(*[(DESCRIBE, [8, 2])] * 8)
    seq = answer(DESCRIBE, [8] * 3)
    assert lengths.of(seq).left(3, 1000) == 500
    lengths.add(answer(DESCRIBE, [8] * 30))
    assert lengths.of(seq).left(3, 1000) < 200


def test_what_doubles_is_looked_up_again():
    lengths = taught(*[(DESCRIBE, [8] * 90)] * 8)
    seq = answer(DESCRIBE, [8])
    assert lengths.of(seq).left(1, 1000) > 80
    for _ in range(40):
        lengths.add(answer(DESCRIBE, [8] * 20))
    assert lengths.of(seq).left(1, 1000) < 60


def test_a_question_before_its_picture_is_read():
    """Placeholders behind it do not fill what is looked at."""
    picture = [99] * 64 + [3]
    lengths = taught(*[(asked + picture, said) for asked, said in BOTH])
    assert lengths.of(answer(IS_THERE + picture, [])).left(0, 1000) < 4
    assert lengths.of(answer(DESCRIBE + picture, [], slot=1)).left(0, 1000) > 25


def test_an_answer_that_was_cut_might_have_gone_on():
    lengths = Lengths()
    for _ in range(20):
        seq = Sequence(DESCRIBE, SamplingParams(max_tokens=16), 0, frozenset(), 10**6, slot=0)
        while not seq.append(8, Origin.DRAFTED, ""):
            pass
        lengths.add(seq)
    ends = lengths.of(answer(DESCRIBE, [8]))
    assert ends.left(1, 1000) == pytest.approx(31, abs=1)
    assert ends.left(1, 15) == 15
    assert ends.continue_probs(10, 8) == [1.0] * 8


def test_while_few_are_known_each_new_one_counts():
    lengths, seq = taught((IS_THERE, [7, 2])), answer(IS_THERE, [])
    before = lengths.of(seq).left(0, 1000)
    lengths.add(answer(IS_THERE, [7, 2]))
    assert lengths.of(seq).left(0, 1000) < before


def test_a_slot_is_forgotten():
    lengths = taught(*BOTH)
    assert lengths.of(answer(IS_THERE, [])).left(0, 1000) < 4
    lengths.release(0)
    assert lengths.of(answer(DESCRIBE, [])).left(0, 1000) > 25


def test_all_answers_to_one_prompt_count():
    """Not the last few alone."""
    lengths = taught(*[(DESCRIBE, [8] * 40)] * 30, *[(DESCRIBE, [8] * 2)] * 3)
    assert lengths.of(answer(DESCRIBE, [])).left(0, 1000) > 30


def test_a_good_draft_of_a_short_answer_is_left_alone():
    """As accurate as can be, without anything to read, a quarter of a pass a token: in answers of one it is lost."""

    def speed() -> float:
        member = Member("m", lambda *_: 0.99, 0.003)
        return simulate(model, [member], requests=150, tokens=128, length=lambda request: 1).speed

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
        assert known(*seen).should_wait(emitted, gain, price) == waits


def test_few_answers_say_nothing_of_waiting():
    assert not known(2, 2, 40).should_wait(0, 0.1, 3.0)
    assert known(2, 2, 2, 40).should_wait(0, 0.1, 3.0)


def short_answers(kinds: tuple[int, ...], chance: float, seed: int) -> float:
    """Speed of the default policy: answers of these lengths in turns, far below their limit, behind prompts whose
    reading takes a draft model 1.2 passes."""
    member = Member("m", lambda *_: chance, 0.0012, 0.012 / 100, reads=True)
    told = simulate(
        model, [member], requests=60, tokens=128, seed=seed, length=lambda request: kinds[request % len(kinds)]
    )
    return told.speed


CASES = [((2,), 0.3, 0.98), ((2,), 0.6, 0.98), ((3,), 0.4, 0.97), ((40,), 0.8, 1.4), ((2, 2, 60), 0.8, 1.4)]


@pytest.mark.parametrize(("kinds", "chance", "least"), CASES)
def test_short_answers_are_left_alone(kinds, chance, least):
    speeds = sorted(short_answers(kinds, chance, seed) for seed in range(3))
    assert speeds[1] >= least, speeds


MIXED = (2, 24, 53)


READER = Member("reader", lambda *_: 0.85, 0.0015, 0.016 / 100, reads=True)  # of a prompt in 1.6 passes
SELF_DRAFT = Member("self", lambda *_: 0.95, 0.0025)


def speeds_by_kind(asks, member=READER) -> list[float]:
    """Yes, captions and steps in turns, after twelve to learn from."""
    told = simulate(model, [member], requests=72, tokens=128, length=lambda request: MIXED[request % 3], asks=asks)
    mine = [[told.by_request[request] for request in range(12 + kind, 72, 3)] for kind in range(3)]
    return [sum(plain for _, plain in kind) / sum(spent for spent, _ in kind) for kind in mine]


def three_questions(request: int) -> list[int]:
    """Of one form for each kind, with words that differ."""
    rng = random.Random(request)
    return [100 * (request % 3) + rng.randint(2, 9) for _ in range(6)]


def test_a_yes_among_captions_is_left_alone_and_the_mutant_that_reads_no_question_pays_for_it():
    speeds = speeds_by_kind(three_questions)
    least = [0.99, 1.2, 1.4]
    assert all(speed > bound for speed, bound in zip(speeds, least, strict=True)), speeds
    assert speeds_by_kind(lambda request: [])[0] < 0.95


def test_a_draft_that_needs_no_reading_is_not_tried_where_the_next_token_is_the_last(monkeypatch):
    speeds = speeds_by_kind(three_questions, SELF_DRAFT)
    least = [0.98, 1.2, 1.4]
    assert all(speed > bound for speed, bound in zip(speeds, least, strict=True)), speeds
    monkeypatch.setattr(Ends, "continue_probs", lambda self, emitted, depth: [1.0] * depth)  # the mutant
    assert speeds_by_kind(three_questions, SELF_DRAFT)[0] < 0.95


def test_without_lengths_short_answers_pay(monkeypatch):
    """The mutant: half of the limit, as long as an answer may be, is what reading is spread over."""
    monkeypatch.setattr(Ends, "left", lambda self, emitted, limit: max(1.0, limit / 2))
    monkeypatch.setattr(Ends, "continue_probs", lambda self, emitted, depth: [1.0] * depth)
    monkeypatch.setattr(Ends, "should_wait", lambda *_: False)
    kinds, chance, least = CASES[0]
    assert max(short_answers(kinds, chance, seed) for seed in range(5)) < least
