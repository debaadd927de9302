"""Audits of a server with planted faults: each is found, and nothing is found where there are none."""

import dataclasses
import json

import pytest

from paceline.audit.answers import Ask, Server
from paceline.audit.audit import Audit, Plan
from paceline.audit.client import Client, Unreachable
from paceline.audit.engines import identify
from paceline.audit.verdicts import Verdict

from .fake import serving

PROMPTS = [[{"role": "user", "content": f"question {i}"}] for i in range(5)]


def sides_of(url: str, **more) -> list[Server]:
    client = Client(url, timeout_s=5.0, **more)
    engine = identify(client)
    on = Server(client, engine, "fake", "with drafts")
    return [on, Server(client, engine, "fake", "without drafts", engine.off)]


def audited(url: str, sides=None, **plan) -> Audit:
    settings = {"prompts": PROMPTS, "max_tokens": 8, "temperature": None, "repeats": 1, "timings": 0} | plan
    audit = Audit(sides or sides_of(url), Plan(**settings))
    audit.run()
    return audit


def counts(audit: Audit, name: str) -> dict[str, int]:
    found = next(one for one in audit.record.comparisons if one.name == name)
    return {verdict.value: count for verdict, count in found.counts.items() if count}


PAIR = "with drafts against without drafts"


def test_honest_server_passes():
    with serving() as (url, fake):
        audit = audited(url, temperature=1.0, samples=40, timings=1, card=2.5)
        assert fake.most > 1  # batches are
    record = audit.record
    assert record.is_complete
    for fail_on in ("different", "unstable", "near-tie"):
        assert record.failures(fail_on) == []
    assert counts(audit, PAIR) == {"identical": 5}
    assert len(record.tests) == 3
    assert all(test.least_shift < 0.6 for test in record.tests)
    assert [speed.name for speed in record.speeds] == ["with drafts", "without drafts"]
    assert record.drafts[0].length == pytest.approx((3.0, 3.0, 3.0))
    assert not record.remarks


@pytest.mark.parametrize("chat", [True, False])
def test_fault_in_batches_only(chat):
    prompts = PROMPTS if chat else [prompt[0]["content"] for prompt in PROMPTS]
    with serving(together=3) as (url, _):
        audit = audited(url, prompts=prompts)
    names = [one.name for one in audit.record.comparisons if one.counts[Verdict.DIFFERENT]]
    assert set(names) == {"with drafts, together", "without drafts, together"}
    cases = next(one for one in audit.record.comparisons if one.name == names[0]).cases
    case = next(case for case in cases if case.worst.verdict is Verdict.DIFFERENT)
    assert case.worst.difference.position == 3
    assert case.worst.difference.unit == "token"
    assert case.worst.difference.gaps[0] == pytest.approx(0.9)
    assert "more than rounding explains" in case.worst.reason
    assert audit.record.failures()


@pytest.mark.parametrize("place", [0, 1, 7])
def test_fault_with_drafts_only(place):
    with serving(drafts=place) as (url, _):
        audit = audited(url)
    assert counts(audit, PAIR) == {"different": 5}
    assert counts(audit, "with drafts, together") == {"identical": 5}
    found = next(one for one in audit.record.comparisons if one.name == PAIR).cases[0].worst.difference
    assert found.position == place


def test_lost_token():
    with serving(drops=True) as (url, _):
        audit = audited(url)
    assert counts(audit, PAIR) == {"different": 5}
    reason = next(one for one in audit.record.comparisons if one.name == PAIR).cases[0].worst.reason
    assert "ended where the other continued" in reason
    assert any("7 tokens are counted in an answer that was cut at 8" in fault.text for fault in audit.record.faults)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_end_of_the_context_is_no_fault(is_known, monkeypatch):
    if not is_known:
        monkeypatch.setattr(Audit, "_longest", lambda *_: None)
    with serving(context=len(json.dumps(PROMPTS[0])) + 5) as (url, _):
        faults = [fault.text for fault in audited(url).record.faults]
    assert any("an answer that was cut at" in text for text in faults) == (not is_known)


def test_near_ties_fail_where_asked():
    with serving(flat=True, drafts=2) as (url, _):
        audit = audited(url)
    assert counts(audit, PAIR) == {"near-tie": 5}
    assert audit.record.failures("different") == audit.record.failures("unstable") == []
    assert audit.record.failures("near-tie")
    with serving(flat=True, drafts=2) as (url, _):
        assert counts(audited(url, tolerance=0.01), PAIR) == {"different": 5}


def test_unstable_server():
    with serving(flat=True, again=4) as (url, _):
        audit = audited(url, repeats=2)
    assert audit.record.failures("different") == []
    assert any("again" in text for text in audit.record.failures("unstable"))


def test_greedy_that_is_not():
    with serving(greedy=1) as (url, _):
        audit = audited(url)
    assert counts(audit, PAIR) == {"identical": 5}
    assert any("0.90 nats less likely" in fault.text for fault in audit.record.faults)


def test_wrong_usage():
    with serving(counts=1) as (url, _):
        audit = audited(url)
    assert any("9 tokens where at most 8" in fault.text for fault in audit.record.faults)
    with serving(counts=-1) as (url, _):
        audit = audited(url)
    assert any("7 tokens are counted and 8 listed" in fault.text for fault in audit.record.faults)


def test_biased_samples_with_drafts():
    with serving(sharpened=0.4) as (url, _):
        audit = audited(url, is_greedy=False, temperature=1.0, samples=60)
    failed = {test.name for test in audit.record.tests if not test.passed}
    assert failed == {"with drafts and without drafts", "with drafts, against its own log-probabilities"}


@pytest.mark.more
def test_biased_samples_without_logprobs():
    with serving(sharpened=0.4, logprobs=False) as (url, _):
        audit = audited(url, is_greedy=False, temperature=1.0, samples=60)
    assert [test.passed for test in audit.record.tests] == [False]


def test_ignored_seed():
    with serving(ignores_seed=True) as (url, _):
        audit = audited(url, is_greedy=False, temperature=1.0, samples=20)
    assert all(fault.is_unstable for fault in audit.record.faults)
    assert "the same seed gave another answer" in audit.record.faults[0].text
    assert audit.record.failures("different") == []
    assert audit.record.failures("unstable")


def test_low_acceptance():
    with serving(accepted=1) as (url, _):
        audit = audited(url, card=2.5)
    assert audit.record.drafts[0].is_below_card
    assert any("below the 2.50 of the card" in text for text in audit.record.failures())


@pytest.mark.parametrize("metrics", ["vllm", "tgi"])
def test_a_card_where_every_draft_is_rejected(metrics):
    with serving(accepted=0, metrics=metrics) as (url, _):
        audit = audited(url, card=2.5)
    assert audit.record.drafts[0].is_below_card


def test_a_card_is_compared_with_the_server_that_drafts():
    with serving(accepted=1) as (url, _):
        audit = audited(url, sides_of(url)[::-1], card=2.5)
    assert [(one.name, one.card) for one in audit.record.drafts] == [("with drafts", 2.5)]
    assert any("below the 2.50 of the card" in text for text in audit.record.failures())
    with serving(accepted=0, metrics="tgi") as (plain, _), serving(accepted=1, metrics="tgi") as (url, _):
        first, second = (Server(Client(at), identify(Client(at)), "fake", at) for at in (plain, url))
        audit = audited(url, [first, second], card=2.5)
    assert [one.card for one in audit.record.drafts] == [None, 2.5]


def test_a_card_without_greedy_answers():
    with serving() as (url, _):
        audit = audited(url, is_greedy=False, card=2.5)
    assert [remark for remark in audit.record.remarks if "card" in remark] == [
        "the card was not compared: it is compared in greedy answers, which were not asked"
    ]


@pytest.mark.parametrize("tells", ["vllm", "llama.cpp"])
def test_drafts_are_counted_once(tells):
    """Where some answers tell their own drafts, and others leave it to the metrics."""
    with serving(tells=tells) as (url, _):
        audit = audited(url, card=2.5)
    found = audit.record.drafts[0]
    assert (found.drafted, found.accepted, found.passes) == (200, 100, 50)
    assert (found.card, found.length[0]) == (2.5, 3.0)


def test_metrics_that_fail_once():
    with serving(unread=(2,)) as (url, _):
        assert audited(url).record.drafts[0].passes == 30  # 2 of 5 answers are lost


def test_passes_without_a_draft_are_not_compared_with_a_card():
    """llama.cpp's answers count them as well; its metrics do not."""
    with serving(tells="llama.cpp", unread=tuple(range(100))) as (url, _):
        audit = audited(url, sides_of(url)[:1], card=2.5)
    found = audit.record.drafts[0]
    assert (found.is_exact, found.card) == (False, None)
    assert found.length[0] < 2.5
    assert any("start it with --metrics" in remark for remark in audit.record.remarks)
    assert audit.record.failures() == []


def test_samples_have_seeds_of_their_own():
    with serving() as (url, fake):
        audited(url, is_greedy=False, temperature=1.0, samples=10)
    seeds = [body["seed"] for body in fake.asked if body["max_tokens"] == 6]
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 10


def test_a_failed_answer_is_no_broken_seed():
    with serving(broken={2: "fails"}) as (url, _):
        audit = audited(url, is_greedy=False, temperature=1.0, samples=10)
    assert [fault.text[:32] for fault in audit.record.faults] == ["1 of 12 sampled answers failed: "]
    assert "out of memory" in audit.record.faults[0].text


def test_a_seed_that_is_not_taken_is_not_broken():
    with serving(refuses=("seed",), ignores_seed=True) as (url, _):
        audit = audited(url, is_greedy=False, temperature=1.0, samples=10)
    assert not audit.record.faults
    assert any("refuses seed" in remark for remark in audit.record.remarks)


def test_a_server_that_fails_while_timed_ends_the_audit():
    with serving(broken=dict.fromkeys(range(1, 100), "fails")) as (url, fake):
        with pytest.raises(Unreachable, match="5 requests in a row"):
            audited(url, sides_of(url)[:1], is_greedy=False, timings=4)
        assert len(fake.asked) == 6


@pytest.mark.parametrize("most", [1, 2])
def test_a_server_with_few_slots(most):
    with serving() as (url, _):
        side = sides_of(url)[0]
        audit = audited(url, [dataclasses.replace(side, engine=side.engine._replace(most=most))])
    assert ("with drafts, together" in [one.name for one in audit.record.comparisons]) == (most > 1)
    assert any(f"takes {most} requests at a time, so not 4" in remark for remark in audit.record.remarks)


def test_without_logprobs_nothing_is_close():
    with serving(flat=True, drafts=2, logprobs=False) as (url, _):
        audit = audited(url)
    assert counts(audit, PAIR) == {"different": 5}
    worst = next(one for one in audit.record.comparisons if one.name == PAIR).cases[0].worst
    assert worst.reason == "no log-probabilities to tell whether it was close"
    assert worst.difference.unit == "character"
    assert any("lists no log-probabilities" in remark for remark in audit.record.remarks)


@pytest.mark.parametrize("name", ["logprobs", "seed", "stream_options"])
def test_refused_fields_are_left_out(name):
    with serving(refuses=(name,)) as (url, fake):
        audit = audited(url, timings=1)
        assert sum(name in body for body in fake.asked) == 2  # once for each side
    assert counts(audit, PAIR) == {"identical": 5}
    assert any(f"refuses {name}" in remark for remark in audit.record.remarks)


def test_two_servers():
    with serving() as (url, _), serving(greedy=0) as (other, _):
        first, second = (Server(Client(at), identify(Client(at)), "fake", at) for at in (url, other))
        audit = audited(url, [first, second])
    assert counts(audit, f"{url} against {other}") == {"different": 5}


@pytest.mark.more
def test_same_seed_same_plan():
    """What is asked, and in which order, depends on the seed alone."""
    asked = list[list[dict]]()
    for seed in (1, 1, 2):
        with serving() as (url, fake):
            audited(url, prompts=PROMPTS[:2], seed=seed, concurrency=1, temperature=1.0, samples=4)
            asked.append(fake.asked)
    assert asked[0] == asked[1] != asked[2]


def test_seeds_and_temperature_reach_the_server():
    with serving() as (url, fake):
        side = sides_of(url)[1]
        side.answer(PROMPTS[0], Ask(3, 0.5, 7))
    assert {key: fake.asked[-1][key] for key in ("temperature", "seed", "max_tokens", "speculative")} == {
        "temperature": 0.5, "seed": 7, "max_tokens": 3, "speculative": {"method": "none"},
    }  # fmt: skip
