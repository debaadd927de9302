"""Two answers: where they part, and whether it was close."""

import pytest

from paceline.audit.answers import Answer, Token
from paceline.audit.verdicts import TOLERANCE, Verdict, compare, drift, faults, same_token, witnessed


def answer(*tokens: str, top=None, logprobs=True, **more) -> Answer:
    """Of tokens; `top`: the log-probabilities at the last one, "$" is not part of the text."""
    listed = [Token(token, -0.1, {token: -0.1}) for token in tokens]
    if top is not None:
        listed[-1] = Token(tokens[-1], top.get(tokens[-1]), top)
    text = "".join(token for token in tokens if token != "$")
    return Answer(text, tuple(listed) if logprobs else (), **{"finish_reason": "length", **more})


def said(text: str, *tokens: str, top: dict[str, float]) -> Answer:
    """Of this text; the last token is the first of `top`."""
    last = next(iter(top))
    return Answer(text, (*(Token(token, -0.1, {token: -0.1}) for token in tokens), Token(last, top[last], top)))


AB, BA = {" b": -0.7, " c": -0.8}, {" c": -0.7, " b": -0.75}
THE, THERE = {" the": -0.7, " there": -0.8}, {" there": -0.7, " the": -0.8}
END, GOES_ON = {"$": -0.7, " b": -0.8}, {" b": -0.7, "$": -0.8}
HALVES = r"bytes:\xf0\x9f\x98", r"bytes:\x80"
HALF, OTHER_HALF = {r"bytes:\x80": -0.7, r"bytes:\x81": -0.8}, {r"bytes:\x81": -0.7, r"bytes:\x80": -0.75}
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
        # parts of a character, as bytes, as nothing or U+FFFD, or as the whole for its last one
        (said("😀 b", *HALVES, top=AB), said("😀 c", "\ufffd", "\ufffd", top=BA), "near-tie", 2),
        (said("😀 b", *HALVES, top=AB), said("😀 c", "", "😀", top=BA), "near-tie", 2),
        (said("😀 b", *HALVES, top=AB), Answer("😀 c"), "near-tie", 2),
        (said("😀 b", "\ufffd", "\ufffd", top=AB), Answer("😀 c"), "near-tie", 2),
        (said("😀", *HALVES[:1], top=HALF), said("😁", *HALVES[:1], top=OTHER_HALF), "near-tie", 1),
        (said("😀", *HALVES[:1], top=HALF), Answer("😁"), "near-tie", 1),
        (said("a\ufffd", "a", top={HALVES[0]: -0.7, " b": -0.8}), said("a b", "a", top=AB), "different", 1),
        (said("a\ufffd", "a", top={HALVES[0]: -0.7, " b": -0.8}), Answer("a b"), "near-tie", 1),
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


def test_a_context_may_end_before_the_answer():
    """It did not where the server had room for more."""
    cut = answer(" a", " b", completion_tokens=2, prompt_tokens=30)
    assert faults(cut, 4, True, longest=32) == []
    assert faults(cut, 4, True, longest=33) == ["2 tokens are counted in an answer that was cut at 4"]
    assert faults(answer(" a", completion_tokens=1), 4, True, longest=33) == []


def test_two_tokens_of_one_text_are_no_fault():
    """The list has the less likely one."""
    assert faults(Answer("a", (Token("a", -0.5, {"a": -3.0, "b": -1.2}),)), 1, True) == []


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("a", "a", True), ("a", " a", False), (r"bytes:\x80", "\ufffd", True), (r"bytes:\x80", "", True),
        (r"bytes:\x80", "😀", True), (r"bytes:\x81", "😀", False), (r"bytes:\x80", r"bytes:\x81", False),
        ("\ufffd", "😀", True), ("\ufffd", "", True), ("\ufffd", "a", False), ("", "a", False),
        (r"bytes:\x80", "a", False),
    ],
)  # fmt: skip
def test_names_of_one_token(first, second, same):
    assert same_token(first, second) == same_token(second, first) == same
