"""Two answers: where they part, and whether it was close."""

import pytest

from paceline.audit.answers import Answer, Token
from paceline.audit.verdicts import TOLERANCE, Verdict, compare, drift, faults, witnessed


def answer(*tokens: str, top=None, logprobs=True, **more) -> Answer:
    """Of tokens; `top`: the log-probabilities at the last one, "$" is not part of the text."""
    listed = [Token(token, -0.1, {token: -0.1}) for token in tokens]
    if top is not None:
        listed[-1] = Token(tokens[-1], top.get(tokens[-1]), top)
    text = "".join(token for token in tokens if token != "$")
    return Answer(text, tuple(listed) if logprobs else (), **{"finish_reason": "length", **more})


AB, BA = {" b": -0.7, " c": -0.8}, {" c": -0.7, " b": -0.75}
THE, THERE = {" the": -0.7, " there": -0.8}, {" there": -0.7, " the": -0.8}
END, GOES_ON = {"$": -0.7, " b": -0.8}, {" b": -0.7, "$": -0.8}
UNSPELLED = (Token("x", -0.1, {"x": -0.1}),)


@pytest.mark.parametrize(
    ("first", "second", "verdict", "position"),
    [
        (answer(" a", " b"), answer(" a", " b"), "identical", None),
        (answer(" a", " b", top=AB), answer(" a", " c", top=BA), "near-tie", 1),
        (answer(" a", " b", top=AB), answer(" a", " c", top={" c": 0.0, " b": -0.5}), "different", 1),
        (answer(" a", " b", top={" b": 0.0}), answer(" a", " c", top=BA), "different", 1),
        # one side alone has log-probabilities
        (answer(" a", " b", top=AB), answer(" a", " c", logprobs=False), "near-tie", 1),
        (answer(" a", " c", logprobs=False), answer(" a", " b", top=AB), "near-tie", 1),
        (answer(" a", " b", top=AB), answer(" a", " d", logprobs=False), "different", 1),
        (answer(" a", logprobs=False), answer(" b", logprobs=False), "different", 1),
        # a token that begins with the other one
        (answer(" the", top=THE), answer(" there", top=THERE), "near-tie", 0),
        (answer(" the", top=THE), answer(" there", logprobs=False), "near-tie", 0),
        # the end of an answer, which servers list or not
        (answer(" a", "$", top=END), answer(" a", " b", top=GOES_ON), "near-tie", 1),
        (answer(" a", "$", top={"$": 0.0, " b": -0.8}), answer(" a", " b", top=GOES_ON), "different", 1),
        (answer(" a"), answer(" a", " b", top=GOES_ON), "different", 1),
        (answer(" a", "$", top=END), answer(" a", " b", logprobs=False), "near-tie", 1),
        # tokens that do not spell the text
        (Answer("ab", UNSPELLED), Answer("ac", UNSPELLED), "different", 1),
        # a text without the blank that its first token has
        (Answer("b", answer(" b", top=AB).tokens), Answer("c", answer(" c", top=BA).tokens), "near-tie", 0),
    ],
)  # fmt: skip
def test_where_answers_part(first, second, verdict, position):
    found = compare(first, second)
    assert found.verdict == verdict
    assert (found.difference.position if found.difference else None) == position


@pytest.mark.parametrize(
    ("witness", "verdict"),
    [
        (answer(" a", " b", top=AB), "near-tie"),
        (answer(" a", " c", top=BA), "near-tie"),
        (answer(" a", " d", top={" d": -0.1, " b": -2.0, " c": -2.1}), "near-tie"),
        (answer(" a", " b", top={" b": 0.0, " c": -3.0}), "different"),
        (answer(" a", " b", top={" b": 0.0}), "different"),
        (answer(" x", " b", top=AB), "different"),
    ],
)
def test_a_third_answer_tells_what_was_close(witness, verdict):
    first, second = answer(" a", " b", logprobs=False), answer(" a", " c", logprobs=False)
    open_one = compare(first, second)
    assert open_one.is_open
    assert witnessed(open_one, first, second, {"the third": witness}).verdict == verdict
    assert witnessed(open_one, first, second, {"the third": first}) == open_one


def test_context():
    found = compare(answer(" a", " b", top=AB), answer(" a", " c", top=BA)).difference
    assert (found.before, found.first, found.second, found.unit) == (" a ", "b", "c", "token")
    assert found.gaps == pytest.approx((0.1, 0.05))


def test_counts_and_reasons_are_compared():
    same = answer(" a", completion_tokens=1, prompt_tokens=3)
    assert compare(same, answer(" a", completion_tokens=2)).verdict is Verdict.DIFFERENT
    assert compare(same, answer(" a", prompt_tokens=4)).verdict is Verdict.DIFFERENT
    assert compare(same, answer(" a", finish_reason="stop")).verdict is Verdict.DIFFERENT
    assert compare(same, answer(" a")).verdict is Verdict.IDENTICAL  # a server that counts nothing


def test_engines_may_count_the_end_differently():
    first, second = (answer(" a", completion_tokens=count, finish_reason="stop") for count in (1, 2))
    assert compare(first, second).verdict is Verdict.DIFFERENT
    assert compare(first, second, same_engine=False).verdict is Verdict.IDENTICAL
    cut = [answer(" a", completion_tokens=count) for count in (1, 2)]
    assert compare(*cut, same_engine=False).verdict is Verdict.DIFFERENT


def test_drift_ends_where_answers_part():
    first = Answer("ab", (Token("a", -0.1, {}), Token("b", -0.5, {})))
    second = Answer("ac", (Token("a", -0.3, {}), Token("c", -9.0, {})))
    assert drift(first, second) == pytest.approx(0.2)
    assert drift(first, Answer("ab")) is None


def test_faults_of_one_answer():
    assert faults(answer(" a", completion_tokens=1), 1, True) == []
    assert faults(answer(" a", completion_tokens=2, finish_reason="stop"), 4, True) == []
    assert faults(answer(" a", completion_tokens=3, finish_reason="stop"), 4, True)
    assert faults(answer(" a", " b"), 1, True)
    wrong = answer(" a", top={" a": -1.0, " b": -1.0 + 2 * TOLERANCE})
    assert faults(wrong, 1, True)
    assert not faults(wrong, 1, False)
