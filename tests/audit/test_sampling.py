"""Tests of distributions: how often they accuse a server without fault, and what they notice."""

import math
import random
from collections import Counter
from functools import cache

import pytest

from paceline.audit import sampling
from paceline.audit.answers import Answer, Token
from paceline.measure.chi_square import against, at_least, between, least_shift, tail

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


@cache
def law(before: str) -> list[float]:
    weights = [random.Random(before + word).random() ** 3 + 0.01 for word in WORDS]
    return [weight / sum(weights) for weight in weights]


def answers(seed: int, count: int = 100, power: float = 1.0, listed: bool = True) -> list[Answer]:
    """Samples of three tokens; power: of the probabilities of all but the first token, which drafts may spoil."""
    draw, found = random.Random(seed), list[Answer]()
    for _ in range(count):
        text, tokens = "", list[Token]()
        for place in range(3):
            probs = law(text)
            top = {word: math.log(prob) for word, prob in zip(WORDS, probs, strict=True)}
            word = draw.choices(WORDS, [prob**power if place else prob for prob in probs])[0]
            likely = sorted(top, key=top.__getitem__)[-5:]
            tokens.append(Token(word, top[word], {one: top[one] for one in {*likely, word}}))
            text += word
        found.append(Answer(text, tuple(tokens) if listed else ()))
    return found


def p_values(power: float, seeds: range, listed: bool = True, count: int = 100) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"two": [], "rank": [], "first": []}
    for seed in seeds:
        plain, other = answers(2 * seed, count, 1.0, listed), answers(2 * seed + 1, count, power, listed)
        found["two"].append(sampling.two_sided("", [(plain, other)], 1).p_value)
        if listed:
            found["rank"].append(sampling.by_rank("", other, 1).p_value)
            first = dict(zip(WORDS, map(math.log, law("")), strict=True))
            found["first"].append(sampling.exact("", [(other, first)], 1).p_value)
    return found


@pytest.mark.parametrize("listed", [True, False])
def test_false_alarms_are_as_rare_as_stated(listed):
    for name, values in p_values(1.0, range(50), listed).items():
        if listed or name == "two":
            assert min(values) > sampling.FALSE_ALARM, name
            # A binomial of 50 and a fifth is beyond 22 in one of 10,000 cases.
            assert sum(value < 0.2 for value in values) <= 22, (name, values)


@pytest.mark.parametrize("listed", [True, False])
def test_spoiled_samples_are_noticed(listed):
    found = p_values(3.0, range(5), listed, 400)
    for name in ("two", "rank") if listed else ("two",):
        assert max(found[name]) < sampling.FALSE_ALARM, (name, found[name])
    if listed:
        assert min(found["first"]) > sampling.FALSE_ALARM  # drafts have no part in first tokens


def test_greedy_samples_are_noticed():
    """A server that ignores the temperature."""
    greedy = [Answer("a", (Token("a", math.log(0.6), {"a": math.log(0.6), "b": math.log(0.4)}),))] * 60
    assert not sampling.by_rank("", greedy, 1).passed
    assert not sampling.exact("", [(greedy, {"a": math.log(0.6), "b": math.log(0.4)})], 1).passed


SPACE = {" The": 0.35, " T": 0.2, " They": 0.1, " Then": 0.08, " It": 0.1, "It": 0.05, "</s>": 0.05}
"""First tokens that are likely; 7% are others, and some of them begin alike."""
OTHERS = {" This": 0.04, "bytes:\\xf0\\x9f": 0.02, " Its": 0.01}


def firsts(seed: int, count: int, listed: bool, power: float = 1.0, blank: bool = True) -> list[Answer]:
    """Answers of a first token and "he" or an "s". Half of the engines list no end, nor the blank of first tokens."""
    draw, found, law = random.Random(seed), list[Answer](), SPACE | OTHERS
    for word in draw.choices([*law], [prob**power for prob in law.values()], k=count):
        if word == "</s>":
            found.append(Answer("", (Token(word, -1.0, {}),) if listed and blank else ()))
            continue
        name = word if blank else word.lstrip()
        text = ("\ufffd" if "bytes" in word else name.strip()) + draw.choice(["he", "s", " a"])
        name = name if blank or "bytes" not in word else "\ufffd"
        found.append(Answer(text, (Token(name, -1.0, {}), Token(" a", -1.0, {})) if listed else ()))
    return found


@pytest.mark.parametrize(("listed", "blank"), [(True, True), (True, False), (False, True)])
def test_first_tokens_of_engines_that_write_them_otherwise(listed, blank):
    law = {word: math.log(prob) for word, prob in SPACE.items()}
    p_values = [
        sampling.exact("", [(firsts(seed, count, listed, 1.0, blank), law)], 1).p_value
        for seed, count in enumerate([*[100] * 15, *[5000] * 2])
    ]
    assert min(p_values) > sampling.FALSE_ALARM
    for power in (4.0, 0.2):  # of a law that is too sharp or too flat
        assert not sampling.exact("", [(firsts(0, 400, listed, power, blank), law)], 1).passed


def short(seed: int, count: int, lists_end: bool, parts: str, ends: float = 0.5) -> list[Answer]:
    """Answers that begin with an emoji and may end at once."""
    draw, found = random.Random(seed), list[Answer]()
    for _ in range(count):
        text, words = "😀", [parts, parts]
        while len(words) < 6 and draw.random() > ends:
            words.append(draw.choice(" ab"))
            text += words[-1]
        words += ["</s>"] if lists_end and len(words) < 6 else []
        found.append(Answer(text, tuple(Token(word, -1.0, {}) for word in words)))
    return found


@pytest.mark.parametrize("count", [100, 2000])
def test_ends_and_parts_of_characters_that_engines_list_otherwise(count):
    ours, theirs = short(0, count, True, r"bytes:\xf0\x9f"), short(1, count, False, "\ufffd")
    assert sampling.two_sided("", [(ours, theirs)], 1).passed
    if count == 2000:
        assert not sampling.two_sided("", [(ours, short(1, count, False, "\ufffd", 0.4))], 1).passed


@pytest.mark.parametrize("name", ["\ufffd", r"bytes:\x80"])
def test_likely_tokens_of_one_text(name):
    """Every second position has several, of which one is listed: any of U+FFFD, the likeliest otherwise."""
    draw, found = random.Random(0), list[Token]()
    for place in range(20_000):
        words = [name, name, "a", "b", name, "c", "d"] if place % 2 else ["e", "f", "a", "b", "c", "d", name]
        probs = [0.35, 0.25, 0.12, 0.1, 0.08, 0.06, 0.04]
        mine = draw.choices(range(7), probs)[0]
        order = [mine, *(at for at in range(5) if at != mine)]
        order = order if name == "\ufffd" else sorted(order, reverse=True)
        top = {words[at]: math.log(probs[at]) for at in order}
        found.append(Token(words[mine], math.log(probs[mine]), top))
    right = Answer("", tuple(found))
    assert sampling.by_rank("", [right], 1).passed
    sharp = tuple(token for token in found if token.logprob > -2.6 or draw.random() < 0.5)
    assert not sampling.by_rank("", [Answer("", sharp)], 1).passed


def test_too_few_samples_accuse_nobody():
    few = answers(0, count=2)
    for test in (sampling.two_sided("", [(few, answers(1, count=2))], 1), sampling.by_rank("", few, 1)):
        assert test.passed
        assert test.least_shift > 0.9
    assert sampling.two_sided("", [([], [])], 1).p_value == 1.0
    assert sampling.by_rank("", [Answer("a")], 1) is None


def test_cells_hold_every_sample_once():
    first, second = ([(*text, "\0") for text in side] for side in (["ab"] * 30 + ["ac"] * 5, ["ab"] * 20 + ["bc"] * 15))
    cells = sampling.cells_of(first, second)
    assert [sum(column) for column in zip(*cells, strict=True)] == [35, 35]
    assert sorted(cells) == [(5, 0), (30, 20), (0, 15)] or all(sum(cell) >= 10 for cell in cells)


def test_chi_square_of_a_table():
    """R: chisq.test(matrix(c(30, 10, 20, 40), 2), correct=FALSE)."""
    found = between([(30, 20), (10, 40)])
    assert (found.value, found.freedom) == (pytest.approx(16.667, abs=1e-3), 1)
    assert found.p_value == pytest.approx(4.456e-05, rel=1e-3)
    assert against({0: 8, 1: 12}, [0.5, 0.5]).p_value == pytest.approx(0.3711, abs=1e-4)
    assert tail(3.0, 0) == 1.0


def test_probabilities_of_which_lower_bounds_are_known():
    """What fits best has at most the statistic of the true ones."""
    assert at_least({0: 70, 1: 30}, [0.6, 0.3]).value == pytest.approx(0.0, abs=1e-6)
    assert at_least({0: 95, 1: 5}, [0.6, 0.3]).value == pytest.approx(against({0: 95, 1: 5}, [0.7, 0.3]).value)
    draw = random.Random(0)
    for _ in range(50):
        seen = Counter(draw.choices(range(4), [0.4, 0.3, 0.2, 0.1], k=200))
        assert at_least(seen, [0.35, 0.28, 0.2, 0.0]).value <= against(seen, [0.4, 0.3, 0.2, 0.1]).value + 1e-9


def test_least_shift_is_noticed_nine_times_of_ten():
    """By simulation: two samples of a half and of a half more the shift."""
    shift, noticed, draw = least_shift(100, 1, 1e-3), 0, random.Random(0)
    for _ in range(400):
        counts = [sum(draw.random() < prob for _ in range(200)) for prob in (0.5 - shift / 2, 0.5 + shift / 2)]
        noticed += between([(counts[0], counts[1]), (200 - counts[0], 200 - counts[1])]).p_value < 1e-3
    assert 0.83 < noticed / 400 < 0.97
