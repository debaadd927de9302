"""Requests that begin alike share what was computed, and are answered as if they did not."""

import pytest
import torch

from paceline import LLM, AsyncLLM, DraftModel, Eagle, PromptLookup, SamplingParams, SelfQuantized
from paceline.attention.kv_cache import SlotCache
from paceline.errors import ConfigError
from paceline.methods import Space
from tests.adversaries import RandomTrees
from tests.async_llm.common import LONG, answer, facts, idle, run, schedule, serve, tiny_llm, wrong
from tests.exactness.drafters import small_draft
from tests.methods.heads import random_head
from tests.methods.space.common import adapter
from tests.vision.families import make_image, seeing, user

SYSTEM = "you answer in short words, and you never say what you do not know. "
PROMPTS = (
    SYSTEM + "the cat and the cat",
    SYSTEM + "abcabcabcab",
    SYSTEM + "the cat and the dog",
    SYSTEM * 2 + "x",
    SYSTEM[:40],
    "x" + SYSTEM,
)
SHORT = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)
DRAFTERS = {
    "plain": lambda: None,
    "lookup": PromptLookup,
    "draft model": lambda: DraftModel(small_draft()),
    "eagle": lambda: Eagle(random_head(tiny_llm().loaded, 3)),
    "space": lambda: Space(adapter(transition_rank=4), top_k=2),
    "self int4": lambda: SelfQuantized(lm_head="shared"),
    "random trees": RandomTrees,
}


def mistakes(llm: LLM, seed: int, prompts=PROMPTS, **options) -> tuple[list[int], int]:
    """The requests of a schedule that were answered wrongly, and the tokens of prompts that were found."""
    asks = schedule(seed, 20, prompts)

    async def main(engine):
        got = await run(engine, asks)
        assert llm.runner.prefixes.num_bytes <= llm.runner.prefixes.max_bytes
        return got, engine.stats().prefix_cache_hits

    got, hits = serve(llm, main, **options)
    return wrong(llm, asks, got), hits


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(("chunk", "most"), [(None, None), (16, 150_000)])
def test_random_schedules(name, chunk, most):
    llm = tiny_llm(DRAFTERS[name](), chunk=chunk)
    found, hits = mistakes(llm, len(name) + (chunk or 0), prefix_cache_bytes=most)
    assert found == []
    assert hits > 0


@pytest.mark.parametrize("most", [None, 150_000])
@pytest.mark.parametrize("name", ["qwen3_5", *(pytest.param(one, marks=pytest.mark.more) for one in ("lfm2", "bamba"))])
def test_recurrent_layers(name, most):
    llm = tiny_llm(PromptLookup(), chunk=16, name=name)
    for seed in range(2):
        found, hits = mistakes(llm, seed, prefix_cache_bytes=most)
        assert found == []
    assert hits > 0


def test_images():
    llm = LLM(seeing("qwen2_vl"), drafter=PromptLookup(), max_num_seqs=3)
    llm.runner.chunk = 8
    small, other = make_image(1), make_image(2)
    chats = [[user(small, "what is it?")], [user(other, "what is it?")], [user(small, "what is it ", other, "?")]]
    found, hits = mistakes(llm, 5, chats)
    assert found == []
    assert hits > 0


def test_a_wrong_column_is_noticed(monkeypatch):
    """Mutant: the last column that was found is another one."""
    restore = SlotCache.restore

    def shifted(self, slot, pages, length, *rest):
        restore(self, slot, pages, length, *rest)
        with torch.inference_mode():
            for layer in (*self.keys, *self.values):
                layer[slot, :, length - 1] = layer[slot, :, 0]

    monkeypatch.setattr(SlotCache, "restore", shifted)
    assert any(mistakes(tiny_llm(), seed)[0] for seed in range(2))


def test_the_next_turn_of_a_chat_reads_what_is_new():
    llm = tiny_llm(PromptLookup())
    first = llm.encode(PROMPTS[0])

    async def main(engine):
        one = await answer(engine, first, SHORT)
        later = [*first, *one.token_ids, *llm.encode("and then")]
        two = await answer(engine, later, SHORT)
        return one, later, two, engine.stats()

    one, later, two, stats = serve(llm, main)
    known = len(first) + len(one.token_ids) - 1
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, known // 16 * 16)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (len(first) + len(later), two.num_cached_tokens)
    llm.runner.prefixes.resize(0)
    assert facts(llm.plain().generate([later], SHORT)[0]) == facts(two)


def test_answers_of_one_request_read_its_prompt_once():
    llm = tiny_llm(slots=4)
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)

    async def main(engine):
        return await answer(engine, PROMPTS[0], params), engine.stats()

    output, stats = serve(llm, main)
    length = len(output.prompt_token_ids)
    assert stats.prefix_cache_queries == 4 * length
    assert stats.prefix_cache_hits == 3 * (length // 16 * 16)
    assert facts(output) == facts(llm.plain().generate([PROMPTS[0]], params)[0])


def test_what_an_aborted_request_read_is_found():
    llm = tiny_llm(slots=2)

    async def main(engine):
        outputs = engine.generate(PROMPTS[0], LONG)
        await anext(outputs)
        await outputs.aclose()
        await idle(engine)
        return await answer(engine, PROMPTS[0], SHORT)

    got = serve(llm, main)
    assert got.num_cached_tokens == len(got.prompt_token_ids) // 16 * 16
    llm.runner.prefixes.resize(0)
    assert facts(llm.plain().generate([PROMPTS[0]], SHORT)[0]) == facts(got)


def test_it_can_be_switched_off():
    llm = tiny_llm()

    async def main(engine):
        outputs = [await answer(engine, PROMPTS[0], SHORT) for _ in range(2)]
        return [one.num_cached_tokens for one in outputs], engine.stats().prefix_cache_queries

    assert serve(llm, main, prefix_cache_bytes=0) == ([0, 0], 0)
    counts, queries = serve(llm, main, prefix_cache_bytes=1 << 20)
    assert counts[1] > counts[0] == 0
    assert queries > 0
    with pytest.raises(ConfigError, match="prefix_cache_bytes"):
        AsyncLLM(llm, prefix_cache_bytes=-1)
