"""Answers of a form: those of the oracle without speculation, and the same with every drafter."""

import pytest

from paceline import DraftModel, Lookahead, Ratio, SamplingParams, Typical
from paceline.core.interfaces import Drafter
from paceline.core.request import TokenSequence
from paceline.engine import loop
from paceline.sampling.grammar import Grammar
from tests.adversaries import Constant, Scripted
from tests.exactness.drafters import DRAFTERS, runner_for, small_draft
from tests.helpers import REPEATING, assert_sound, loaded, oracle, result, run, runner, sequence
from tests.oracle import autoregressive
from tests.structured.common import END, FORMS, WITH_ORACLE, Guided, formed, is_over, is_whole, may_be, pieces, possible

_ANSWERS: dict[object, TokenSequence] = {}


def prompt_of(form: str) -> list[int]:
    return [*REPEATING, 3 + list(FORMS).index(form)]


def slow(form: str, temperature: float) -> TokenSequence:
    """Without speculation, token by token; remembered."""
    key = form, temperature
    if key not in _ANSWERS:
        _ANSWERS[key] = autoregressive(loaded(), formed(form, prompt_of(form), temperature))
    return _ANSWERS[key]


def text_of(seq: TokenSequence) -> str:
    return "".join(pieces()[token] for token in seq.output_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", WITH_ORACLE)
def test_plain_answers_are_the_oracles(form, temperature):
    pattern, ids = FORMS[form][1], prompt_of(form)
    seq = slow(form, temperature)
    params = SamplingParams(temperature, max_tokens=24, logits_processors=(Guided(pattern, len(ids)),))
    guided = autoregressive(loaded(), sequence(loaded(), ids, params, eos_ids=END))
    whole = is_over(pattern, text_of(seq))
    assert seq.output_ids == guided.output_ids[: -1 if whole else None]
    assert seq.finish_reason == guided.finish_reason
    assert may_be(pattern, text_of(seq))
    assert seq.finish_reason == "length" or is_whole(pattern, text_of(seq))


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter(drafter, temperature):
    """All forms in one batch of fewer slots, beside an answer of no form; what a grammar forbids is never verified."""
    expected = {form: slow(form, temperature) for form in FORMS}
    free = oracle(loaded(), REPEATING, SamplingParams(max_tokens=9))
    future = {tuple(seq.prompt_ids): seq.token_ids + [7] * 30 for seq in [*expected.values(), free]}
    seqs = {form: formed(form, prompt_of(form), temperature) for form in FORMS}
    other = sequence(loaded(), REPEATING, free.params)
    run(runner_for(drafter), DRAFTERS[drafter](loaded(), future), [*seqs.values(), other])
    assert result(other) == result(free)
    for form, seq in seqs.items():
        assert result(seq) == result(expected[form]), form
        assert_sound(seq, 4)
        if FORMS[form][1]:
            assert forbidden_drafts(seq, FORMS[form][1]) == 0


def forbidden_drafts(seq: TokenSequence, pattern: str) -> int:
    """How many nodes were verified whose text cannot be in an answer."""
    count, done = 0, 0
    for record in seq.rounds:
        paths: list[list[int]] = [seq.output_ids[:done]]
        for token, parent in zip(record.token_ids[1:], record.parents[1:], strict=True):
            count += token not in possible(pattern, "".join(pieces()[one] for one in paths[parent]))
            paths.append([*paths[parent], token])
        done += record.num_emitted
    return count


def test_forbidden_drafts_are_found_out(monkeypatch):
    """Mutant: nothing is dropped."""
    monkeypatch.setattr(loop, "without_forbidden", lambda draft, seqs: draft)
    seq = formed("regex", REPEATING)
    run(runner(loaded()), Constant(7), [seq])
    assert forbidden_drafts(seq, FORMS["regex"][1]) > 0


def test_a_parser_that_stays_ahead_is_found_out(monkeypatch):
    """Mutant: after the walk down an accepted path the parser is not taken back, so its end counts at every token."""

    def stuck(self: Grammar, tokens: list[int]) -> None:
        self._matcher.try_consume_tokens(tokens[len(self._read) :])
        self._read = max(self._read, list(tokens), key=len)

    want, seq = slow("json", 1.0), formed("json", prompt_of("json"), 1.0)
    assert want.finish_reason == "stop"
    monkeypatch.setattr(Grammar, "_go", stuck)
    run(runner(loaded()), Scripted({tuple(want.prompt_ids): want.token_ids}, [None]), [seq])
    assert result(seq) != result(want)


@pytest.mark.parametrize("verifier", [Ratio, lambda: Typical(allow_lossy=True)])
@pytest.mark.parametrize("form", WITH_ORACLE)
def test_other_rules_keep_the_form(form, verifier):
    seq = formed(form, prompt_of(form), 1.0)
    run(runner(loaded()), DraftModel(small_draft()), [seq], verifier=verifier())
    assert may_be(FORMS[form][1], text_of(seq))
    assert seq.finish_reason == "length" or is_whole(FORMS[form][1], text_of(seq))


def test_lookahead_reads_its_window_behind_what_was_dropped(monkeypatch):
    """The window moves on by the same tokens, whichever candidates before it were dropped."""

    def windows(drop: bool) -> list[list[list[int]]]:
        seen, drafter = list[list[list[int]]](), Lookahead(window=4, ngram=3, guesses=3)
        observe = Lookahead.observe

        def watching(self: Drafter, *given) -> None:
            observe(drafter, *given)
            seen.append([list(row) for state in drafter._states.values() for row in state.rows])

        with monkeypatch.context() as patch:
            patch.setattr(Lookahead, "observe", watching)
            if not drop:
                patch.setattr(loop, "without_forbidden", lambda draft, seqs: draft)
            seq = formed("gbnf", prompt_of("gbnf"), 1.0)
            run(runner(loaded()), drafter, [seq])
        dropped.append(sum(record.num_nodes for record in seq.rounds))
        return seen

    dropped = list[int]()
    assert windows(drop=True) == windows(drop=False)
    assert dropped[0] < dropped[1]
