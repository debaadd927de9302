"""Adapters beside the engine's other parts: answers that give way, small and rounded caches, images, embeddings."""

import asyncio
import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from paceline import LLM, Fixed, LoRARequest, PoolingParams, PromptLookup, SamplingParams
from paceline.engine.loop import SpeculativeDecoder
from paceline.target import LoadedModel, wrap_model
from tests import lora
from tests.async_llm.common import TEXTS, answer, facts, idle, serve, tiny_llm
from tests.engine.common import push
from tests.helpers import loaded, talking
from tests.tiny import tiny_model
from tests.vision.families import make, make_image, user

NAMES = ("", "one", "two")
LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


@cache
def folders(name: str = "llama") -> dict[str, Path]:
    top, model = Path(mkdtemp(prefix="adapters-")), tiny_model(name)
    return {one: lora.save(top / one, model, 2 + 3 * n, seed=n) for n, one in enumerate(NAMES[1:])}


def params(name: str, of: SamplingParams = LONG) -> SamplingParams:
    return replace(of, extra_args={"adapter": name}) if name else of


@cache
def merged(name: str) -> LoadedModel:
    model = tiny_model("llama", max_position_embeddings=512)
    return wrap_model(lora.merged(model, folders().get(name)), tokenizer=talking().tokenizer)


@cache
def alone(name: str, text: str, of: SamplingParams = LONG) -> list[tuple]:
    """Without drafts."""
    return facts(LLM(merged(name)).generate(text, of)[0])


# Answers that give way


def give_way(monkeypatch, often: float = 0.5, **options) -> bool:
    """Whether all answers are right though adapters are removed and replaced while answers wait to go on."""
    push(monkeypatch, often)
    llm = tiny_llm(PromptLookup(), chunk=16, adapters=folders(), **options)
    asks = [(text, name) for text in TEXTS[:4] for name in NAMES]

    async def main(engine):
        many = [asyncio.create_task(answer(engine, text, params(name))) for text, name in asks]
        while engine.num_running < 2 or any(ticket.request is None for ticket in engine._thread.tickets.values()):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(llm.remove_adapter, "two")
        await asyncio.to_thread(llm.add_adapter, "one", folders()["two"])  # another one of the same name
        got = await asyncio.gather(*many)
        later = await answer(engine, TEXTS[0], params("one"))
        await idle(engine)
        assert engine.stats().preemptions > 10
        return [facts(one) for one in got], facts(later)

    got, later = serve(llm, main)
    return got == [alone(name, text) for text, name in asks] and later == alone("two", TEXTS[0])


COLUMN = 2 * 2 * 2 * 8 * 4  # bytes of the tiny model: keys and values of 2 layers, 2 heads of 8 floats


@pytest.mark.parametrize("size", [0, 1 << 24])
@pytest.mark.parametrize("memory", [None, 384 * COLUMN])
def test_answers_that_give_way_go_on_with_their_adapters(size, memory, monkeypatch):
    assert give_way(monkeypatch, prefix_cache_bytes=size, kv_cache_memory_bytes=memory)


def test_an_answer_that_goes_on_with_the_newest_adapter_is_noticed(monkeypatch):
    admit = SpeculativeDecoder.admit

    def newest(self, seq, is_used=None):
        if seq.adapter is not None:
            seq.adapter = self.runner.adapters._by_name.get(seq.adapter.name)
        return admit(self, seq, is_used)

    monkeypatch.setattr(SpeculativeDecoder, "admit", newest)
    assert not give_way(monkeypatch)


def test_several_answers_of_an_adapter():
    llm = tiny_llm(PromptLookup(), adapters=folders())
    asked = [params(name, replace(LONG, n=3)) for name in NAMES]
    want = [facts(LLM(talking(max_position_embeddings=512), adapters=folders()).generate(TEXTS[0], one)[0])
            for one in asked]  # fmt: skip
    assert [facts(one) for one in llm.generate([TEXTS[0]] * 3, asked)] == want
    assert [one[0] for one in want] == [alone(name, TEXTS[0])[0] for name in NAMES]


# What drafts and caches hold


@pytest.mark.parametrize("drafter", ["lookup", "self-int4:window=16"])
@pytest.mark.parametrize("form", ["auto", "int8"])
def test_windows_of_drafts_and_rounded_caches(drafter, form):
    """Texts of more than four windows."""
    llm = LLM(loaded(), drafter=drafter, policy=Fixed(3), kv_cache_dtype=form, adapters=folders(), max_num_seqs=4)
    texts = [[5, 9, 31, 7, 5, 9, 31, 8] * 12] * 3
    asked = [*map(params, NAMES)]
    got = [one.token_ids for one in llm.generate(texts, asked)]
    assert got == [llm.plain().generate(texts[0], one)[0].token_ids for one in asked]
    assert len({*map(tuple, got)}) == 3


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_images(name, tmp_path):
    """An adapter for the text model, saved by the paths of the whole one; questions about the same image."""
    model, processor = make(name)
    text = model.model.language_model
    adapter = lora.save(tmp_path, text, seed=1)
    whole = copy.deepcopy(model)
    whole.model.language_model = lora.merged(text, adapter)
    want, plain = (LLM(wrap_model(one, processor=processor), prefix_cache_bytes=0) for one in (whole, model))
    llm = LLM(wrap_model(model, processor=processor), drafter=PromptLookup(), policy=Fixed(3), max_num_seqs=3,
              adapters={"one": adapter}, prefix_cache_bytes=1 << 24)  # fmt: skip
    of, image = replace(LONG, max_tokens=16), make_image(1)
    chats = [[user(image, "what is it?")], [user(image, "what is that?")], [user("see ", image, " then say")]]
    for chat in chats:
        expected = [one.generate(chat, of)[0].token_ids for one in (plain, want)]
        assert expected[0] != expected[1]
        got = llm.generate([chat, chat], [of, params("one", of)])
        assert [one.token_ids for one in got] == expected


# Embeddings and scores


def test_embeddings_and_scores():
    llm = LLM(talking(max_position_embeddings=512), adapters={"one": folders()["one"]}, prefix_cache_bytes=1 << 24)
    texts, one, two = [*TEXTS], LoRARequest("one", 1), LoRARequest("two", 2, folders()["two"])

    def vectors(on: LLM, many=texts, **options) -> list[list[float]]:
        return [made.outputs.embedding for made in on.embed(many, pooling="mean", **options)]

    own, bare = vectors(llm, lora_request=one), vectors(llm)
    torch.testing.assert_close(torch.tensor(own), torch.tensor(vectors(LLM(merged("one")))), atol=1e-4, rtol=1e-4)
    assert bare == vectors(LLM(talking(max_position_embeddings=512)))
    assert vectors(llm, texts * 2, lora_request=[one] * 5 + [None] * 5) == own + bare
    asked = PoolingParams(pooling="mean", extra_args={"adapter": "one"})
    assert [made.outputs.embedding for made in llm.embed(texts, asked)] == own != bare
    assert len({*map(tuple, own), *map(tuple, bare), *map(tuple, vectors(llm, lora_request=two))}) == 15

    def scores(on: LLM, **options) -> list[float]:
        return [made.outputs.score for made in on.score("a cat?", texts, **options)]

    own, bare = scores(llm, lora_request=one), scores(llm)
    assert own == pytest.approx(scores(LLM(merged("one"))), rel=1e-3)
    assert scores(llm, lora_request=[one, one, None, None, one]) == [*own[:2], *bare[2:4], own[4]]
    assert own != bare == scores(LLM(talking(max_position_embeddings=512)))
