"""How two answers to the same request compare: identical, a near-tie, or different."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from .answers import Answer, spelled

TOLERANCE = 0.25
"""Nats that rounding may move the gap of two tokens by, where nothing better is known.

bfloat16 keeps 8 bits. A logit between 16 and 32 lies on a grid of 0.125; where two are rounded, each may land on the
next point, so their gap changes by up to two steps, 0.25. The rounding within the layers is of the same size:
SmolLM2-135M in bfloat16 moves a log-probability by about 0.04 (root mean square), and four times the noise of a gap of
two such scores, 0.04 * sqrt(2) * 4, is 0.23.
"""
_WHOLE = 4  # bytes of a character, at most
_BACK = 4  # tokens before the first character that differs, which may be where texts part: "the" and "there"
CONTEXT = 60
"""Characters before the first difference that are shown, and after it."""


class Verdict(StrEnum):
    """From good to bad."""

    IDENTICAL = "identical"
    NEAR_TIE = "near-tie"  # the servers' own log-probabilities say that rounding decided between two tokens
    DIFFERENT = "different"
    FAILED = "failed"  # one side gave no answer


@dataclass(frozen=True)
class Difference:
    """Where two answers part. position: of the token, or of the character where no tokens are listed.

    before: the text that both have there; first, second: how each goes on; gaps: by how much each side prefers its own
    token, in nats, None where it does not list both.
    """

    position: int
    unit: str
    before: str
    first: str
    second: str
    gaps: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Judgement:
    """A verdict, its reason in words, and where the answers part. is_open: neither side lists log-probabilities."""

    verdict: Verdict
    reason: str = ""
    difference: Difference | None = None
    is_open: bool = False


def compare(first: Answer, second: Answer, tolerance: float = TOLERANCE, same_engine: bool = True) -> Judgement:
    """Compare two answers; text, why they ended and how many tokens are counted must all be the same.

    same_engine: engines count differently a token that ends an answer, so two of them may differ by it.
    """
    if first.text != second.text:
        return _parted(first, second, tolerance)
    if first.finish_reason != second.finish_reason:
        return Judgement(Verdict.DIFFERENT, f"one ended by {first.finish_reason}, the other by {second.finish_reason}")
    for what, name in (("completion_tokens", "tokens"), ("prompt_tokens", "tokens of the prompt")):
        counts = getattr(first, what), getattr(second, what)
        slack = not same_engine and name == "tokens" and first.finish_reason != "length"
        if None not in counts and abs(counts[0] - counts[1]) > slack:
            return Judgement(Verdict.DIFFERENT, f"the same text, counted as {counts[0]} and as {counts[1]} {name}")
    return Judgement(Verdict.IDENTICAL)


def witnessed(
    judgement: Judgement, first: Answer, second: Answer, witnesses: Mapping[str, Answer], tolerance: float = TOLERANCE
) -> Judgement:
    """The verdict on two answers without log-probabilities, by those of others to the same prompt that begin alike.

    witnesses: by name. As before where none lists both tokens.
    """
    alike = common(first.text, second.text)
    for name, witness in witnesses.items():
        if witness.tokens and common(witness.text, first.text[:alike]) == alike:
            goes_as = [common(witness.text, one.text) > alike for one in (first, second)]
            short = [0.0 if same else _gap(witness, one)[0] for same, one in zip(goes_as, (first, second), strict=True)]
            if short[0] is not None and short[1] is not None:
                return _by_gap(abs(short[0] - short[1]), f" to {name}", judgement.difference, tolerance)
    return judgement


def drift(first: Answer, second: Answer) -> float | None:
    """The most by which the log-probabilities of two answers differ before they part; None where none are listed."""
    apart = list[float]()
    for ours, theirs in zip(first.tokens, second.tokens, strict=False):
        if not same_token(ours.text, theirs.text):
            break
        if ours.logprob is not None and theirs.logprob is not None:
            apart.append(abs(ours.logprob - theirs.logprob))
    return max(apart, default=None)


def faults(
    answer: Answer, max_tokens: int, is_greedy: bool, tolerance: float = TOLERANCE, longest: int | None = None
) -> list[str]:
    """What contradicts itself in one answer: its counts, and a greedy token that is not the most likely one.

    longest: the most tokens of a prompt and its answer that this server had, so that its context did not end before.
    """
    found, count, listed, read = list[str](), answer.completion_tokens, len(answer.tokens), answer.prompt_tokens
    has_room = longest is None or (read is not None and count is not None and read + count < longest)
    if max(count or 0, listed) > max_tokens:
        found.append(f"{max(count or 0, listed)} tokens where at most {max_tokens} were asked for")
    elif count is not None and answer.finish_reason == "length" and count < max_tokens and has_room:
        found.append(f"{count} tokens are counted in an answer that was cut at {max_tokens}")
    # A token that ends the answer may be counted and not listed, or the reverse.
    if count is not None and listed and abs(count - listed) > (answer.finish_reason != "length"):
        found.append(f"{count} tokens are counted and {listed} listed")
    if is_greedy:
        for place, token in enumerate(answer.tokens):
            best = max(token.top, key=token.top.__getitem__, default=None)
            known = [one for one in (token.logprob, token.top.get(token.text)) if one is not None]
            own = max(known, default=None)  # they differ where two tokens have one text
            if best is not None and own is not None and token.top[best] - own > tolerance:
                short = token.top[best] - own
                found.append(f"token {place + 1}, {token.text!r}, is {short:.2f} nats less likely than {best!r}")
                break
    return found


# Helpers


def same_token(first: str, second: str) -> bool:
    """Whether two texts may be of one token: servers write parts of a character as bytes, U+FFFD, or nothing.

    Some write the whole character for its last part.
    """
    parts = [not text or "\ufffd" in text or text.startswith("bytes:") for text in (first, second)]
    if first == second or not any(parts):
        return first == second
    one, other = spelled(first), spelled(second)
    if one and other:
        return not all(parts) and (one if parts[1] else other).endswith(other if parts[1] else one)
    return all(parts) or not (second if parts[0] else first).isascii()


def common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many characters, or bytes, two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


class Parting(NamedTuple):
    """Where an answer leaves another: at which token, behind how many bytes.

    word: the token of the other answer there, None where it lists none. alike: the bytes that both begin with.
    """

    place: int
    begin: int
    word: str | None
    alike: int

    def others(self, words: Iterable[str], own: str, text: str) -> list[str]:
        """Those of the likely tokens here with which the other answer, of this text, can go on."""
        if self.word is not None:
            known = [*words]
            return [self.word] if self.word in known else [word for word in known if same_token(word, self.word)]
        rest, least = _data(text)[self.begin :], self.alike - self.begin
        data = {word: spelled(word) for word in words if word != own}
        fitting = [(word, len(part)) for word, part in data.items() if part and rest.startswith(part)]
        # A token that the other text holds as well is not what it left; a longer one in its place is.
        return [word for word, size in fitting if size > least or not rest.startswith(spelled(own) or b"")]


def partings(answer: Answer, other: Answer) -> list[Parting]:
    """Where the tokens of an answer leave another one: at one place, or at one of several where tokens are unknown.

    Empty where its tokens do not spell its text, or end before.
    """
    text, end, unknown, found = _data(answer.text), 0, 0, list[Parting]()
    alike = common(text, _data(other.text))
    for place, token in enumerate(answer.tokens):
        theirs, data = other.tokens[place].text if place < len(other.tokens) else None, spelled(token.text)
        begin = end
        if data is not None:
            # Some servers take the blanks off the beginning of a text.
            data = data if place or text.startswith(data) else data.lstrip()
            begin = text.find(data, end, end + _WHOLE * unknown + len(data))
        here = Parting(place, max(begin, end), theirs, alike)
        if theirs is None:
            found.append(here)
        elif not same_token(theirs, token.text):
            return [here]
        if theirs is None and begin < 0:
            # A token that ends the answer is not in its text, nor is a part of a character.
            return found[:-_BACK:-1] if text[end:] in (b"", _data("\ufffd")) else []
        end, unknown = here.begin + len(data or b"") * (begin >= 0), 0 if data else unknown + 1
        if theirs is None and end > alike:
            break
    return found[:-_BACK:-1]


def _data(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _parted(first: Answer, second: Answer, tolerance: float) -> Judgement:
    """The verdict on two answers with different texts."""
    alike, answers = common(first.text, second.text), (first, second)
    found = [_gap(answer, other) for answer, other in zip(answers, answers[::-1], strict=True)]
    gaps, places = [gap for gap, _ in found], [place for _, place in found if place is not None]
    before, *ends = first.text[:alike][-CONTEXT:], *(answer.text[alike:][:CONTEXT] for answer in answers)
    position, unit = (places[0], "token") if places else (alike, "character")
    difference = Difference(position, unit, before, ends[0], ends[1], (gaps[0], gaps[1]))
    if not (first.tokens or second.tokens):
        told = "no log-probabilities to tell whether it was close"
        return Judgement(Verdict.DIFFERENT, told, difference, is_open=True)
    known = [gap for gap, answer in zip(gaps, answers, strict=True) if answer.tokens]
    if None in known:
        what = "one answer ended where the other continued"
        if all(ends):
            what = "the token of one side is not among the likely ones of the other"
        return Judgement(Verdict.DIFFERENT, what, difference)
    return _by_gap(max(abs(gap) for gap in known if gap is not None), "", difference, tolerance)


def _by_gap(gap: float, whose: str, difference: Difference | None, tolerance: float) -> Judgement:
    if gap <= tolerance:
        reason = f"the tokens are {gap:.2g} nats apart{whose}, which rounding may explain (up to {tolerance:g})"
        return Judgement(Verdict.NEAR_TIE, reason, difference)
    reason = f"the tokens are {gap:.2g} nats apart{whose}, more than rounding explains ({tolerance:g})"
    return Judgement(Verdict.DIFFERENT, reason, difference)


def _gap(answer: Answer, other: Answer) -> tuple[float | None, int | None]:
    """By how much an answer prefers its token to the one with which the other goes on, and the place of its token."""
    places = partings(answer, other)
    for here in places:
        token = answer.tokens[here.place]
        own, likely = token.top.get(token.text, token.logprob), here.others(token.top, token.text, other.text)
        if own is not None and likely:
            return own - max(token.top[word] for word in likely), here.place
    return None, places[0].place if places else None
