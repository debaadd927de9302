"""Audits: behind the answer, a share that the seed settles, errors told, the alarm raised and obeyed."""

import threading
import time
import warnings

import pytest

from paceline import Fixed
from paceline.cascade import Cascade, DriftAlarm, DriftWarning, Reason
from paceline.cascade.audit import Auditor
from paceline.cascade.predicted import AnswerChecker
from paceline.errors import ConfigError
from tests.cascade.common import PARAMS, PROMPTS, large, made_up, small

pytestmark = pytest.mark.usefixtures("unchecked_types")


def cascade(threshold: float, **options) -> Cascade:
    return Cascade(small(), large(), made_up(threshold), allow_lossy=True, policy=Fixed(2), **options)


def test_the_checker_says_what_a_comparison_says():
    checker, answers = AnswerChecker(large()), small().plain().generate(PROMPTS[:40], PARAMS)
    own = large().plain().generate(PROMPTS[:40], PARAMS)
    ended = [i for i, one in enumerate(answers) if one.finish_reason == "stop"]
    said = [checker.agrees(PROMPTS[i], PARAMS, answers[i].token_ids) for i in ended]
    assert said == [answers[i].token_ids == own[i].token_ids for i in ended]
    assert len(set(said)) == 2
    assert not checker.agrees(PROMPTS[ended[0]], PARAMS, own[ended[0]].token_ids[:-1]), "a mere beginning is no answer"


def test_every_request_is_drawn_anew():
    one, two = (Auditor(DriftAlarm(0.1), 0.25, seed=3) for _ in range(2))
    drawn = [one.draws() for _ in range(4000)]
    assert drawn == [two.draws() for _ in range(4000)]
    assert 900 < sum(drawn) < 1100
    assert not any(Auditor(DriftAlarm(0.1), 0.0).draws() for _ in range(100))
    assert all(Auditor(DriftAlarm(0.1), 1.0).draws() for _ in range(100))


def test_one_prompt_under_one_seed_is_neither_always_nor_never_audited():
    with cascade(0.0, audit_share=0.5, audit_seed=1, on_alarm="warn") as ours, warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        audited = [one.audited for one in ours.generate([PROMPTS[0]] * 30, PARAMS)]
    assert 8 <= sum(audited) <= 22


def test_what_the_audits_find_is_what_a_comparison_finds():
    with cascade(0.0, audit_share=1.0, on_alarm="warn", queue_size=500) as ours, warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        results = ours.generate(PROMPTS[:40], PARAMS)
        counts = ours.finish_audits()
    own = large().plain().generate(PROMPTS[:40], PARAMS)
    alone = [(one, two) for one, two in zip(results, own, strict=True) if one.decided_by == "small"]
    assert all(one.audited for one in results)
    assert (counts.seen, counts.checked, counts.pending, counts.dropped) == (40, len(alone), 0, 0)
    assert counts.differed == sum(one.token_ids != two.token_ids for one, two in alone) > 0
    stats = ours.stats()
    assert (stats.requests, stats.alone) == (40, len(alone))
    assert stats.coverage == len(alone) / 40


def test_an_alarm_is_raised_and_ends_the_trust():
    ours = cascade(0.0, audit_share=1.0, queue_size=500)
    ours.generate(PROMPTS[:40], PARAMS)
    with pytest.warns(DriftWarning, match="Every answer is verified"):
        ours.finish_audits()
    assert ours.is_alarmed
    assert ours.stats().is_alarmed
    after = ours.generate(PROMPTS[:30], PARAMS)
    own = large().plain().generate(PROMPTS[:30], PARAMS)
    assert [one.token_ids for one in after] == [one.token_ids for one in own]
    assert {one.reason for one in after} == {Reason.ALARM, Reason.LONG}
    assert not any(one.audited for one in after)
    ours.trust_again()
    assert not ours.is_alarmed
    assert any(one.reason is Reason.CONFIDENT for one in ours.generate(PROMPTS[:10], PARAMS))
    ours.close()


def test_an_answer_never_waits_for_an_audit():
    """The large model hangs; answers keep coming, the queue fills, what no longer fits is dropped and counted."""
    ours, gate = cascade(0.0, audit_share=1.0, queue_size=2), threading.Event()
    ours._checker.agrees = lambda *_: gate.wait(30)  # type: ignore[method-assign]
    begin = time.perf_counter()
    results = [ours.generate(one, PARAMS)[0] for one in PROMPTS[:12]]
    assert time.perf_counter() - begin < 25
    assert len(results) == 12
    counts = ours.stats().audits
    assert counts.dropped >= 8
    assert counts.pending <= 3
    assert sum(one.audited for one in results) == 12 - counts.dropped
    gate.set()
    ours.close()
    assert ours.stats().audits.pending == 0


def test_errors_are_told_and_not_counted():
    def fails(*_) -> bool:
        raise RuntimeError("no such luck")

    ours = cascade(0.0, audit_share=1.0)
    ours._checker.agrees = fails  # type: ignore[method-assign]
    results = ours.generate(PROMPTS[:10], PARAMS)
    alone = sum(one.decided_by == "small" for one in results)
    assert alone > 0
    with pytest.warns(RuntimeWarning, match="no such luck"):
        ours.close()
    counts = ours.stats().audits
    assert (counts.errors, counts.checked, counts.seen) == (alone, 0, 10 - alone)
    assert counts.last_error == "RuntimeError: no such luck"


def test_closing():
    ours = cascade(0.0, audit_share=1.0, on_alarm="warn")
    ours.generate(PROMPTS[:4], PARAMS)
    thread = ours._auditor._thread
    assert thread.is_alive()
    ours.close()
    ours.close()
    assert not thread.is_alive()
    assert ours.stats().audits.seen == 4
    with pytest.raises(ConfigError, match="closed"):
        ours._auditor.take(None)
    before = ours.stats()
    for given in (PROMPTS[:2], []):
        with pytest.raises(ConfigError, match=r"(?s)closed.*new Cascade"):
            ours.generate(given, PARAMS)
    assert ours.stats() == before
    never = Auditor(DriftAlarm(0.1))
    never.close()
    assert never._thread is None


def test_discarding_ends_what_waits():
    auditor, gate, begun = Auditor(DriftAlarm(0.1), 1.0), threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        return not gate.wait(30)

    for _ in range(5):
        auditor.take(slow)
    assert begun.wait(10)
    threading.Timer(0.2, gate.set).start()
    auditor.close(discard=True)
    assert auditor.counts().checked == 1
