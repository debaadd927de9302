"""An answer that gives its slot goes on later with the tokens that it would have had, whoever drafts."""

import random
from dataclasses import replace

import pytest
import regex

from paceline import LLM, Fixed, PromptLookup, SamplingParams
from paceline.attention import kv_cache
from paceline.core.structured import StructuredOutputsParams
from paceline.engine.loop import SpeculativeDecoder
from paceline.engine.scheduler import Scheduler
from paceline.target import make_runner
from tests.async_llm.common import TEXTS, answer, facts, run, schedule, serve, tiny_llm, wrong
from tests.engine.common import push
from tests.exactness.drafters import DRAFTERS, runner_for
from tests.exactness.test_identity import REQUESTS, TARGET, future
from tests.helpers import all_free, assert_identical, loaded, reading_apart
from tests.structured.common import FORMS, byte_tokenizer
from tests.vision.families import make_image, seeing, user


def mistakes(llm: LLM, seed: int, prompts=TEXTS, **options) -> tuple[list[int], int]:
    """The wrong answers of a schedule, and how often answers gave their slots."""
    asks, counts = schedule(seed, 14, prompts), list[int]()

    async def main(engine):
        got = await run(engine, asks)
        counts.append(engine.stats().preemptions)
        return got

    return wrong(llm, asks, serve(llm, main, **options)), counts[0]


@pytest.mark.diagonal("slow")
@pytest.mark.parametrize("often", [1.0, 0.3])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(name, slots, often, monkeypatch):
    push(monkeypatch, often)
    drafter = DRAFTERS[name](TARGET, future())
    order = random.Random(slots).sample(REQUESTS, len(REQUESTS))
    assert_identical(runner_for(name, slots), drafter, order, 4, 24)


REREAD = "draft model", "self int4", "lookup recent", "suffix", "eagle", "eagle3", "peagle", "dflash", "mtp", "medusa"


@pytest.mark.parametrize("name", REREAD)
def test_drafts_are_those_of_an_answer_that_kept_its_slot(name, monkeypatch):
    """What drafters read of the target is there again; a text is read apart, so that they draft in each round."""
    asked, both = [(REQUESTS[0][0], SamplingParams(0.7, max_tokens=20, logprobs=2))], list[list[object]]()
    for often in (0, 1.0):
        with monkeypatch.context() as patched:
            push(patched, often)
            on, drafter = reading_apart(make_runner(loaded(), 1)), DRAFTERS[name](TARGET, future())
            (seq,) = assert_identical(on, drafter, asked, 4, 24)
        both.append([seq.rounds, seq.logprobs, seq.origins, seq.sources])
    assert both[0] == both[1]
    assert sum(record.num_nodes for record in both[0][0])


@pytest.mark.parametrize("often", [1.0, 0.3])
@pytest.mark.parametrize("drafter", [None, PromptLookup])
def test_streams(drafter, often, monkeypatch):
    """Stop strings, log-probabilities, two answers, readers that leave: nothing is sent twice or lost."""
    push(monkeypatch, often)
    llm = tiny_llm(drafter and drafter(), chunk=16)
    for size in (0, 1 << 30):
        wrong_ones, count = mistakes(llm, 7, prefix_cache_bytes=size)
        assert wrong_ones == []
        assert count > 10


def test_images(monkeypatch):
    push(monkeypatch, 0.5)
    llm = LLM(seeing(), drafter=PromptLookup(), max_num_seqs=3)
    llm.runner.chunk = 8
    small, wide = make_image(1), make_image(2, 60, 24)
    chats = [[user(small, "what is it?")], [user("see ", wide, " then say")], [user(wide, " or ", small, "?")]]
    assert mistakes(llm, 5, prompts=chats)[0] == []


def test_forms_and_prompt_logprobs(monkeypatch):
    options = [
        SamplingParams(
            1.0,
            seed=3,
            max_tokens=30,
            logprobs=1,
            prompt_logprobs=1,
            structured_outputs=StructuredOutputsParams(**form),
        )
        for form in (FORMS["json"][0], FORMS["regex"][0])
    ]
    model = replace(loaded(), tokenizer=byte_tokenizer())
    llm = LLM(model, drafter=PromptLookup(), policy=Fixed(3), max_num_seqs=2)
    llm.runner.chunk = 16
    want = llm.generate([TEXTS[0], TEXTS[3]], options)
    push(monkeypatch, 0.5)
    got = llm.generate([TEXTS[0], TEXTS[3]], options)
    for one, other in zip(got, want, strict=True):
        assert facts(one) == facts(other)
        assert one.prompt_logprobs == other.prompt_logprobs
    assert regex.fullmatch(FORMS["json"][1], got[0].text)


def test_recurrent_layers(monkeypatch):
    push(monkeypatch, 0.5)
    requests = [([5, 9, 31, 7, 5, 9, 31, 8] * 5, SamplingParams(t, max_tokens=24)) for t in (0.0, 1.0)]
    target = loaded("qwen3_next")
    assert target.is_native
    assert_identical(make_runner(target, 2), PromptLookup(), requests)


def test_times_and_counts(monkeypatch):
    llm = tiny_llm(PromptLookup(), slots=1)
    push(monkeypatch, 1.0)
    (output,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.metrics.rounds == len(output.rounds) == llm._stats.preemptions + 1
    assert llm._stats.prompt_tokens == len(output.prompt_token_ids)
    assert all(record.queue_s > 0 and record.prefill_s > 0 for record in output.rounds)
    assert output.num_cached_tokens == 0


def counts_of_a_prompt_that_is_read_again(monkeypatch):
    """An answer gives its slot once while its prompt is read, and once between that and its first round."""
    whole, make_room, seen = Scheduler.step, Scheduler._make_room, set[str]()

    def preempt_once(self, when):
        if self._holders and when not in seen:
            seen.add(when)
            self.preempt(self._holders[0])

    llm = tiny_llm(PromptLookup(), slots=1, chunk=16)
    llm.runner.prefixes.resize(1 << 20)
    text, params = TEXTS[0] * 3, SamplingParams(max_tokens=4, ignore_eos=True)

    async def main(engine):
        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "step", lambda self: (preempt_once(self, "reading"), whole(self))[1])
            patched.setattr(Scheduler, "_make_room", lambda self: (preempt_once(self, "read"), make_room(self))[1])
            first = await answer(engine, text, params)
        return first, await answer(engine, text, params), engine.stats()

    first, second, stats = serve(llm, main)
    count, known = len(first.prompt_token_ids), second.num_cached_tokens
    assert stats.preemptions == 2
    assert (first.num_cached_tokens, known >= 16) == (0, True)
    assert (stats.prompt_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * count, 2 * count, known)


def test_a_prompt_that_is_read_again_counts_once(monkeypatch):
    counts_of_a_prompt_that_is_read_again(monkeypatch)


def test_a_prompt_that_counts_with_each_reading_is_noticed(monkeypatch):
    """Mutant: it counts again where its answer gives its slot."""
    preempt = Scheduler.preempt

    def counted(self, answer):
        self.stats.count_prompt(answer.seq, True)
        preempt(self, answer)

    monkeypatch.setattr(Scheduler, "preempt", counted)
    with pytest.raises(AssertionError):
        counts_of_a_prompt_that_is_read_again(monkeypatch)


def test_an_error_of_a_second_admission_ends_that_request_alone(monkeypatch):
    push(monkeypatch, 0.5)
    llm = tiny_llm(slots=2)
    admit = llm.decoder.admit

    def failing(seq, is_used=None):
        if seq.num_output and seq.params.max_tokens == 24:
            raise RuntimeError("no")
        return admit(seq, is_used)

    llm.decoder.admit = failing
    one, other = SamplingParams(max_tokens=24, ignore_eos=True), SamplingParams(max_tokens=20, ignore_eos=True)
    failed, whole = llm.generate(list(TEXTS[:2]), [one, other], return_exceptions=True)
    assert str(failed) == "no"
    assert facts(whole) == facts(tiny_llm().generate(TEXTS[1], other)[0])
    assert all_free(llm.runner)


def test_an_answer_goes_on_where_memory_for_its_most_tokens_is_gone(monkeypatch):
    """It may end before."""
    llm = tiny_llm(slots=1)
    want = llm.generate(TEXTS[0], SamplingParams(1.0, seed=1, max_tokens=20, ignore_eos=True))[0].token_ids
    end = max(map(want.index, want))
    params = SamplingParams(1.0, seed=1, max_tokens=400, ignore_eos=True, stop_token_ids=(want[end],))
    push(monkeypatch, 1.0)
    admit = llm.decoder.admit

    def shrinking(seq, is_used=None):
        if seq.num_output:
            monkeypatch.setattr(kv_cache, "available_memory", lambda: 0)
        return admit(seq, is_used)

    llm.decoder.admit = shrinking
    (output,) = llm.generate(TEXTS[0], params)
    assert output.token_ids == want[: end + 1]


# Mutants


def read_prompt_alone(self, seq, is_used=None):
    texts, seq.token_ids = seq.token_ids, list(seq.prompt_ids)
    chunks = ADMIT(self, seq, is_used)
    seq.token_ids = texts if seq.rounds else seq.token_ids
    return iter(()) if seq.rounds else chunks


def send_again(self, answer):
    PREEMPT(self, answer)
    answer.sent = (0, 0)


def forget_the_last(self, answer):
    PREEMPT(self, answer)
    if answer.seq.num_output > 1:
        for each in (answer.seq.token_ids, answer.seq.origins, answer.seq.sources):
            each.pop()


ADMIT, PREEMPT = SpeculativeDecoder.admit, Scheduler.preempt
MUTANTS = {
    "the answer is not read again": (SpeculativeDecoder, "admit", read_prompt_alone),
    "what was sent is sent again": (Scheduler, "preempt", send_again),
    "a token is lost": (Scheduler, "preempt", forget_the_last),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_noticed(mutant, monkeypatch):
    owner, name, fault = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, fault)
    push(monkeypatch, 0.3)
    try:
        assert mistakes(tiny_llm(), 7)[0]
    except Exception:
        return  # noticed by the engine
