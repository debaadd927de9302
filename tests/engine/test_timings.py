"""The seconds of a request and of an engine are sums over its rounds."""

import time

import pytest

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.core.round import Round, Timings
from tests.helpers import REPEATING, prompt
from tests.tiny import tiny_model

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_what_a_batch_shares_counts_once():
    one, other, later = (
        Round("", 0, 0, 1, number=n, batch=2, verify_s=2.0, prefill_s=1.0, learn_s=0.5) for n in (1, 1, 2)
    )
    timings = Timings.of([one, other, later])
    assert (timings.rounds, timings.prefill, timings.verify, timings.decode) == (2, 3.0, 4.0, 5.0)
    assert Timings.of([]) == Timings()


def test_rounds_tell_the_seconds_of_requests_and_of_the_engine(monkeypatch):
    llm = LLM(tiny_model("llama"), drafter=PromptLookup(), policy=Fixed(3), max_num_seqs=2)
    forward = llm.runner.forward
    monkeypatch.setattr(llm.runner, "forward", lambda *args, **more: (time.sleep(0.005), forward(*args, **more))[1])
    begin = time.perf_counter()
    results = llm.generate([REPEATING, prompt(30), prompt(9)], PARAMS)
    elapsed = time.perf_counter() - begin
    rounds = [one for result in results for one in result.rounds]
    whole = Timings.of(rounds)
    assert whole.rounds == llm.decoder.num_rounds == max(one.number for one in rounds)
    assert whole.prefill + whole.decode == pytest.approx(llm._stats.seconds)
    assert 0.005 * whole.rounds < whole.verify < whole.prefill + whole.decode < elapsed
    for result in results:
        assert result.metrics == Timings.of(result.rounds)
        assert all(one.prefill_s > 0 for one in result.rounds[:1])
        assert not any(one.prefill_s or one.queue_s for one in result.rounds[1:])
        assert all(one.learn_s > 0 for one in result.rounds[1:])  # the first engine round had none before it
    assert results[2].metrics.queue > results[0].metrics.queue, "it waited for a slot"
