"""Audits: drawn by chance alone, right about what differs, and the alarm is raised and obeyed."""

import warnings

import pytest

from paceline import Fixed
from paceline.cascade import Cascade, DriftWarning, Reason
from tests.cascade.common import PARAMS, PROMPTS, large, made_up, small


def cascade(**options) -> Cascade:
    return Cascade(small(), large(), made_up(0.0), allow_lossy=True, policy=Fixed(2), **options)


def test_one_prompt_under_one_seed_is_neither_always_nor_never_audited():
    ours = cascade(audit_share=0.5, audit_seed=1, on_alarm="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        audited = [one.audited for one in ours.generate([PROMPTS[0]] * 30, PARAMS)]
    assert 8 <= sum(audited) <= 22


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_the_audits_find_is_what_a_comparison_finds(share):
    ours, unwatched = cascade(audit_share=share, audit_seed=1, on_alarm="warn"), cascade(audit_share=0.0)
    with pytest.warns(DriftWarning, match="It goes on all the same"):
        results = ours.generate(PROMPTS[:40], PARAMS)
    assert [one.token_ids for one in results] == [one.token_ids for one in unwatched.generate(PROMPTS[:40], PARAMS)]
    own = large().plain().generate(PROMPTS[:40], PARAMS)
    pairs = [(one, two) for one, two in zip(results, own, strict=True) if one.audited]
    checked = [(one, two) for one, two in pairs if one.decided_by == "small"]
    differed = sum(one.token_ids != two.token_ids for one, two in checked)
    stats = ours.stats()
    assert (stats.audits.seen, stats.audits.checked, stats.audits.differed) == (len(pairs), len(checked), differed)
    assert 0 < differed < len(checked) < len(pairs)
    assert (len(pairs) == 40) == (share == 1.0)
    assert (stats.requests, stats.alone) == (40, sum(one.decided_by == "small" for one in results))
    assert stats.coverage == stats.alone / 40


def test_an_alarm_is_raised_and_ends_the_trust():
    ours = cascade(audit_share=1.0)
    with pytest.warns(DriftWarning, match="Every answer is verified"):
        ours.generate(PROMPTS[:40], PARAMS)
    assert ours.is_alarmed
    assert ours.stats().is_alarmed
    after = ours.generate(PROMPTS[:30], PARAMS)
    own = large().plain().generate(PROMPTS[:30], PARAMS)
    assert [one.token_ids for one in after] == [one.token_ids for one in own]
    assert {one.reason for one in after} == {Reason.ALARM, Reason.LONG}
    assert not any(one.audited for one in after)
    ours.trust_again()
    assert not ours.is_alarmed
    assert any(one.reason is Reason.CONFIDENT for one in ours.generate(PROMPTS[:5], PARAMS))
