"""What fails, fails for the requests that are to blame: the others are answered as if nothing had been."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

from paceline import AsyncLLM, DraftModel, PromptLookup, SamplingParams
from paceline.engine.request import Answer
from paceline.engine.scheduler import Scheduler
from paceline.errors import DraftError, EngineStopped
from paceline.sampling.detokenize import Detokenizer
from tests.async_llm.common import TEXTS, answer, facts, serve, tiny_llm
from tests.exactness.drafters import small_draft
from tests.helpers import all_free

PARAMS = [SamplingParams(temperature=1.0, max_tokens=30, seed=seed, ignore_eos=True) for seed in range(3)]
BAD = 77  # the seed of the request that fails
BLAMED = SamplingParams(temperature=1.0, max_tokens=30, seed=BAD, ignore_eos=True, stop=("~~",))


class Fault(RuntimeError):
    pass


def fault_if(condition: bool) -> None:
    if condition:
        raise Fault("planted")


def plant(monkeypatch, llm, stage: str) -> None:
    """Have a stage raise in the sixth round of the request with the seed BAD, and in every later one."""
    decoder = llm.decoder

    def is_due(seq) -> bool:
        return seq.seed == BAD and len(seq.rounds) >= 6

    def before(owner, name, due):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: (fault_if(due(*given)), whole(*given, **options))[1])

    if stage == "draft":
        before(decoder.drafter, "propose", lambda seqs, budgets: any(map(is_due, seqs)))
    elif stage == "observe":
        before(decoder.drafter, "observe", lambda seqs, *rest: any(map(is_due, seqs)))
    elif stage == "policy":
        before(decoder.policy, "budgets", lambda seqs: any(map(is_due, seqs)))
    elif stage == "pass":
        step, now = decoder.step, []
        monkeypatch.setattr(decoder, "step", lambda seqs: (now.__setitem__(slice(None), seqs), step(seqs))[1])
        before(decoder.runner, "forward", lambda *rest: any(map(is_due, now)))
    elif stage == "verify":
        # seeds as they are: a single one is to blame
        count = [0]

        def due(draft, distribution, seeds, positions):
            count[0] += BAD in seeds
            return BAD in seeds and count[0] > 6

        before(decoder.verifier, "verify", due)
    elif stage == "stop strings":
        before_feed = Detokenizer.feed

        def feed(self, token):
            fault_if(self._stop == ("~~",) and len(self._ids) > 6)
            return before_feed(self, token)

        monkeypatch.setattr(Detokenizer, "feed", feed)
    elif stage == "detokenise":
        take = Answer.take_text

        def take_text(self):
            fault_if(is_due(self.seq))
            return take(self)

        monkeypatch.setattr(Answer, "take_text", take_text)


STAGES = ["policy", "draft", "pass", "verify", "stop strings", "detokenise", "observe"]


@pytest.mark.diagonal
@pytest.mark.parametrize("make", [PromptLookup, lambda: DraftModel(small_draft())], ids=["lookup", "draft model"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_ends_its_own_request_alone(stage, make, monkeypatch):
    llm = tiny_llm(make(), slots=4)
    want = [facts(llm.generate(text, params)[0]) for text, params in zip(TEXTS, PARAMS, strict=False)]
    plant(monkeypatch, llm, stage)

    async def main(engine):
        tasks = [(TEXTS[0], BLAMED), *zip(TEXTS, PARAMS, strict=False)]
        got = await asyncio.gather(*(answer(engine, *one) for one in tasks), return_exceptions=True)
        assert engine.is_alive
        stats = engine.stats()
        assert (stats.finished, stats.failed) == (3, 1)
        again = await answer(engine, TEXTS[0], PARAMS[0])
        return got, again

    (error, *others), again = serve(llm, main)
    assert isinstance(error, Fault | DraftError)
    assert "planted" in str(error)
    assert [facts(one) for one in others] == want
    assert facts(again) == want[0]


def test_a_fault_of_a_processor_is_its_requests_own():
    llm = tiny_llm(PromptLookup(), slots=4)

    def broken(ids, scores):
        fault_if(ids.shape[1] > len(TEXTS[0]) + 8)
        return scores

    async def main(engine):
        bad = SamplingParams(max_tokens=30, ignore_eos=True, logits_processors=[broken])
        got = asyncio.gather(*(answer(engine, TEXTS[1], one) for one in (bad, *PARAMS)), return_exceptions=True)
        return await got, engine.stats().retried

    (error, *others), retried = serve(llm, main)
    assert isinstance(error, Fault)
    assert retried == 0
    assert [facts(one) for one in others] == [facts(llm.generate(TEXTS[1], one)[0]) for one in PARAMS]


def test_a_round_that_fails_once_is_run_again(monkeypatch):
    llm = tiny_llm(PromptLookup())
    want = [facts(llm.generate(TEXTS[0], one)[0]) for one in PARAMS]
    whole, failed = llm.runner.forward, []

    def forward(slots, *rest, **options):
        if len(slots) == 3 and not failed:
            failed.append(True)
            raise Fault("once")
        return whole(slots, *rest, **options)

    monkeypatch.setattr(llm.runner, "forward", forward)

    async def main(engine):
        got = await asyncio.gather(*(answer(engine, TEXTS[0], one) for one in PARAMS))
        return [facts(one) for one in got], engine.stats()

    got, stats = serve(llm, main)
    assert failed
    assert (got, stats.retried, stats.failed) == (want, 1, 0)


def test_a_fault_while_a_prompt_is_read(monkeypatch):
    llm = tiny_llm(slots=2, chunk=16)
    want = facts(llm.generate(TEXTS[1], PARAMS[0])[0])
    whole = llm.runner.prefill_chunk

    def prefill_chunk(slot, *rest):
        fault_if(llm.runner.cache.lengths[slot] >= 32)
        return whole(slot, *rest)

    monkeypatch.setattr(llm.runner, "prefill_chunk", prefill_chunk)

    async def main(engine):
        tasks = answer(engine, TEXTS[3], PARAMS[1]), answer(engine, TEXTS[1], PARAMS[0])
        return await asyncio.gather(*tasks, return_exceptions=True)

    error, other = serve(llm, main)
    assert isinstance(error, Fault)
    assert facts(other) == want


def test_a_crash_of_the_thread_fails_every_request(monkeypatch):
    llm = tiny_llm(slots=2)
    want = facts(llm.generate(TEXTS[0], PARAMS[0])[0])
    whole, count = Scheduler.step, []

    def step(self):
        count.append(1)
        if len(count) > 5:
            raise Fault("planted")
        return whole(self)

    monkeypatch.setattr(Scheduler, "step", step)

    async def main():
        engine = AsyncLLM(llm)
        got = await asyncio.gather(*(answer(engine, TEXTS[0], one) for one in PARAMS), return_exceptions=True)
        assert all(isinstance(one, EngineStopped) and "planted" in str(one) for one in got)
        assert not engine.is_alive
        with pytest.raises(EngineStopped, match="planted"):
            await answer(engine, TEXTS[0], PARAMS[0])
        engine.shutdown()

    asyncio.run(main())
    assert all_free(llm.runner)
    monkeypatch.undo()
    assert facts(llm.generate(TEXTS[0], PARAMS[0])[0]) == want


@pytest.mark.more
def test_an_interrupt_ends_the_process():
    """Ctrl-C while an answer comes: the process ends by itself, in the middle of the answer."""
    script = """
        import asyncio, os, signal, time
        from paceline import AsyncLLM, SamplingParams
        from tests.async_llm.common import tiny_llm

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
        llm = tiny_llm()
        step = llm.decoder.step
        llm.decoder.step = lambda seqs: (time.sleep(0.02), step(seqs))[1]  # not at its end when the first output comes

        async def main():
            engine = AsyncLLM(llm)
            async for output in engine.generate("abc", SamplingParams(max_tokens=None, ignore_eos=True)):
                os.kill(os.getpid(), signal.SIGINT)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in ended.stderr
