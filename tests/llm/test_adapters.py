"""Requests that name LoRA adapters: each has the answer of its own model, beside any others and with any drafter."""

import asyncio
import gc
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline import LLM, AsyncLLM, Fixed, LoRARequest, SamplingParams
from paceline.attention.kv_cache import SlotCache
from paceline.errors import ConfigError
from paceline.quant.linears import Weights
from paceline.target import LoadedModel, ModelRunner, wrap_model
from paceline.target.corrections import Corrections
from tests import lora
from tests.exactness.drafters import DRAFTERS
from tests.helpers import REPEATING, SEED, VOCAB, loaded, on_torch, oracle, prompt, talking
from tests.tiny import tiny_model

SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, seed=SEED, ignore_eos=True)
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    return {name: lora.save(place / name, tiny_model("llama"), 2 + 3 * n, seed=n) for n, name in enumerate(NAMES[1:])}


@cache
def merged(folder) -> LoadedModel:
    return loaded() if folder is None else wrap_model(lora.merged(tiny_model("llama"), folder))


def params(name: str, of: SamplingParams = SAMPLED, **more: object) -> SamplingParams:
    return replace(of, extra_args={"adapter": name, **more} if name else more)


def expected(folders, name: str, of: SamplingParams = SAMPLED, ids: list[int] = REPEATING) -> list[int]:
    return oracle(merged(folders.get(name)), ids, of, SEED).output_ids


def answers(llm: LLM, names=NAMES, of: SamplingParams = SAMPLED, ids: list[int] = REPEATING) -> list[list[int]]:
    return [result.token_ids for result in llm.generate([ids] * len(names), [params(name, of) for name in names])]


def are_right(llm: LLM, folders, names=(*NAMES, "one", "")) -> bool:
    return answers(llm, names) == [expected(folders, name) for name in names]


_FIRST = ["lookup recent", "self int4", "space", "eagle3", "dflash", "lookup + eagle3", "random trees"]


@pytest.mark.parametrize(
    "drafter", [name if name in _FIRST else pytest.param(name, marks=pytest.mark.more) for name in DRAFTERS]
)
def test_answers_are_those_of_merged_weights(folders, drafter):
    future = {tuple(REPEATING): [*REPEATING, *expected(folders, "one")]}
    given = DRAFTERS[drafter](loaded(), future)
    llm = LLM(loaded(), drafter=given, policy=Fixed(3, 12), max_num_seqs=4, adapters=folders)
    assert llm.adapters == NAMES[1:]
    assert are_right(llm, folders)


def test_three_answers_differ(folders):
    assert len({tuple(expected(folders, name)) for name in NAMES}) == 3


def test_in_torch(folders):
    llm = LLM(
        on_torch(tiny_model("llama")), drafter="self-int4", policy=Fixed(3), adapters=folders, numerics="invariant"
    )
    assert are_right(llm, folders)


@pytest.mark.parametrize("weights", ["int8", "int4", "q8_0", pytest.param("q4_0", marks=pytest.mark.more)])
def test_with_rounded_weights_they_are_those_of_plain_decoding(folders, weights: Weights):
    """The low-rank term is added to the product with rounded weights; the merged weights were never rounded."""
    wide = tiny_model("llama", hidden_size=64, intermediate_size=96)
    two = {name: lora.save(folders["one"].parent / f"wide-{name}", wide, seed=n) for n, name in enumerate(NAMES[1:])}
    llm = LLM(wide, weights=weights, drafter="lookup", policy=Fixed(3), max_num_seqs=4, adapters=two)
    alone = [answers(llm.plain(), [name])[0] for name in NAMES]
    assert answers(llm) == alone
    assert len({*map(tuple, alone)}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(folders, dtype):
    llm = LLM(tiny_model("llama", dtype), drafter="lookup", policy=Fixed(4), adapters=folders)
    alone = [answers(llm.plain(), [name])[0] for name in NAMES]
    assert answers(llm, (*NAMES, "two")) == [*alone, alone[2]]
    assert answers(LLM(tiny_model("llama", dtype)), [""]) == alone[:1], "a row without adapter keeps its bits"


def test_log_probabilities(folders):
    llm = LLM(loaded(), adapters=folders)
    asked = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0)
    got = llm.generate(REPEATING, params("two", asked))[0]
    want = LLM(merged(folders["two"])).generate(REPEATING, asked)[0]
    for ours, theirs in (
        (got.prompt_logprobs[1:], want.prompt_logprobs[1:]),
        (got.outputs[0].logprobs, want.outputs[0].logprobs),
    ):
        assert [one.token_id for one in ours] == [one.token_id for one in theirs]
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


def leaks(monkeypatch) -> None:
    """The next row's adapter."""
    right = Corrections.of.__func__
    monkeypatch.setattr(
        Corrections, "of", classmethod(lambda cls, adapters, *rest: right(cls, [*adapters[1:], adapters[0]], *rest))
    )


def applies_to_all(monkeypatch) -> None:
    right = Corrections.of.__func__
    found = lambda adapters: next(filter(None, adapters), None)  # noqa: E731
    monkeypatch.setattr(
        Corrections,
        "of",
        classmethod(lambda cls, adapters, *rest: right(cls, [found(adapters)] * len(adapters), *rest)),
    )


def outlives_its_answer(monkeypatch) -> None:
    """The next answer in a slot has the adapter of the last one, if it has none."""
    right = SlotCache.allocate

    def allocate(self, *args):
        before = [*self.adapters]
        slot = right(self, *args)
        self.adapters[slot] = before[slot]
        return slot

    monkeypatch.setattr(SlotCache, "allocate", allocate)


@pytest.mark.parametrize("mutant", [leaks, applies_to_all])
def test_faults_are_noticed(folders, mutant, monkeypatch):
    mutant(monkeypatch)
    assert not are_right(LLM(loaded(), drafter="lookup", policy=Fixed(3), max_num_seqs=4, adapters=folders), folders)


# The prefix cache

LONG = prompt(50)


def cached(folders) -> list[list[int]]:
    llm = LLM(loaded(), adapters=folders, prefix_cache_bytes=1 << 24, drafter="lookup")
    rounds = [answers(llm, [name], ids=LONG)[0] for name in (*NAMES, *NAMES)]
    last = llm.generate(LONG, params("two"))[0]
    assert last.num_cached_tokens >= 48
    llm.add_adapter("one", folders["two"])  # another one of the same name
    return [*rounds, answers(llm, ["one"], ids=LONG)[0]]


def right(folders) -> list[list[int]]:
    return [expected(folders, name, ids=LONG) for name in (*NAMES, *NAMES, "two")]


def test_columns_of_another_adapter_are_never_read(folders):
    assert cached(folders) == right(folders)


@pytest.mark.parametrize("key", ["nothing", "name"])
def test_a_cache_with_another_key_is_noticed(folders, key, monkeypatch):
    restore = ModelRunner.restore_prefix

    def wrong(self, slot, *args, **options):
        adapter = self.cache.adapters[slot]
        by_name = None if adapter is None or key == "nothing" else replace(adapter, fingerprint=adapter.name)
        self.cache.adapters[slot] = by_name
        try:
            return restore(self, slot, *args, **options)
        finally:
            self.cache.adapters[slot] = adapter

    monkeypatch.setattr(ModelRunner, "restore_prefix", wrong)
    assert cached(folders) != right(folders)


# Adding, removing


def test_a_request_keeps_the_adapter_that_it_began_with(folders):
    llm = LLM(loaded(), adapters=folders)
    streams = [llm.stream(REPEATING, params(name)) for name in ("one", "two")]
    tokens = [[*next(stream).token_ids] for stream in streams]
    held = weakref.ref(llm.runner.adapters.get("one").low_rank)
    llm.remove_adapter("one")
    llm.add_adapter("two", folders["one"])
    assert llm.adapters == ("two",)
    with pytest.raises(ConfigError, match=r"no adapter of this name.*'one'.*Expected: two"):
        llm.generate(REPEATING, params("one"))
    for own, stream in zip(tokens, streams, strict=True):
        for chunk in stream:
            own += chunk.token_ids
    assert tokens == [expected(folders, "one"), expected(folders, "two")]
    assert answers(llm, ["two"]) == [expected(folders, "one")]
    del stream, streams, chunk
    gc.collect()
    assert held() is None, "its memory is not free"


def test_they_are_shared_by_all_llms_on_the_same_weights(folders):
    llm = LLM(loaded(), drafter="lookup", adapters=folders)
    plain = llm.plain()
    llm.remove_adapter("two")
    assert plain.adapters == ("one",)
    assert answers(plain, ["one"]) == [expected(folders, "one")]


def test_those_that_cannot_be_used(folders, tmp_path):
    llm = LLM(loaded(), adapters=folders, max_loras=2)
    for add, about in {
        lambda: llm.add_adapter("three", folders["one"]): "too many.*'three'.*at most 2.*max_loras",
        lambda: llm.add_adapter("", folders["one"]): "name",
        lambda: llm.add_adapter("one", tmp_path / "nowhere"): "no adapter at",
        lambda: llm.add_adapter("one", lora.save(tmp_path / "w", tiny_model("llama", hidden_size=64))): (
            "'one' does not fit.*another shape.*64.*32"
        ),
        lambda: llm.add_adapter("one", lora.save(tmp_path / "d", tiny_model("llama", num_hidden_layers=3))): (
            r"no such layer.*layers\.2"
        ),
        lambda: llm.add_adapter("one", lora.save(tmp_path / "s", tiny_model("llama", num_hidden_layers=1))): (
            r"lacks factors.*layers\.1"
        ),
        lambda: llm.add_adapter("one", lora.save(tmp_path / "m", tiny_model("llama"), target_modules=["q_proj"])): (
            "does not name.*k_proj|does not name"
        ),
        lambda: llm.remove_adapter("three"): "no adapter of this name.*one, two",
        lambda: llm.generate(REPEATING, params("three")): "no adapter of this name.*one, two.*add_adapter",
        lambda: SamplingParams(extra_args={"adapter": 3}): "the name of an adapter",
    }.items():
        with pytest.raises(ConfigError, match=rf"(?s){about}"):
            add()
    assert are_right(llm, folders)


LACKING = {
    "experts": ("qwen3_moe", "qwen3", ("gate_proj",), r"no such layer.*mlp\.gate_proj"),
    "keys of latents": ("deepseek_v3", "deepseek_v3", ("kv_b_proj",), r"native passes cannot.*kv_b_proj.*without"),
    "an expert": ("qwen3_moe", "", ("model.layers.0.mlp.experts.1.up_proj", 24, 32), r"native passes.*experts\.1\.up"),
    "no linear layers": ("gpt2", "llama", ("q_proj",), "no such layer"),
    "the output layer": ("llama", "", ("lm_head", VOCAB, 32), "output layer.*lm_head.*merge"),
    "a tower": ("llama", "", ("model.vision_tower.layers.0.self_attn.q_proj", 32, 32), "no such layer.*vision_tower"),
}


@pytest.mark.parametrize("case", LACKING)
def test_layers_whose_rows_cannot_be_corrected_are_named(case, tmp_path):
    name, other, chosen, about = LACKING[case]
    if other:
        lora.save(tmp_path, tiny_model(other), names=chosen)
    else:
        lora.write(tmp_path, {chosen[0]: (torch.ones(2, chosen[2]), torch.ones(chosen[1], 2))}, r=2, lora_alpha=2)
    with pytest.raises(ConfigError, match=rf"(?s)fit this model.*{about}"):
        LLM(loaded(name), adapters={"one": tmp_path})


# vLLM's way


def test_lora_requests(folders):
    llm = LLM(talking(), enable_lora=True, max_lora_rank=16)
    one = LoRARequest("one", 1, str(folders["one"]))
    each = [None, one, LoRARequest("two", 2, folders["two"]), LoRARequest("one", 1)]
    got = llm.generate([REPEATING] * 4, SAMPLED, lora_request=each)
    assert [result.token_ids for result in got] == [expected(folders, name) for name in ("", "one", "two", "one")]
    assert llm.generate(REPEATING, SAMPLED, lora_request=one)[0].token_ids == got[1].token_ids
    chat = [{"role": "user", "content": "abc"}]
    told = llm.chat(chat, SAMPLED, lora_request=one)[0].token_ids
    assert told == llm.generate(chat, params("one"))[0].token_ids != llm.chat(chat, SAMPLED)[0].token_ids
    assert [*llm.stream(chat, SAMPLED, lora_request=one)][-1].completion.token_ids == told
    for call, about in {
        lambda: llm.generate(REPEATING, lora_request=LoRARequest("one", 1, folders["two"])): "from another folder",
        lambda: llm.generate(REPEATING, params("two"), lora_request=one): "different adapters.*'one' and 'two'",
        lambda: llm.generate(REPEATING, lora_request=[one, one]): "differ in number",
        lambda: llm.generate(REPEATING, lora_request=LoRARequest("three", 3)): "no adapter of this name",
        lambda: LoRARequest("", 1): "lora_name",
        lambda: LoRARequest("one", 0): "lora_int_id",
    }.items():
        with pytest.raises(ConfigError, match=rf"(?s){about}"):
            call()


def test_many_at_once(folders):
    async def ask() -> list[list[int]]:
        engine = AsyncLLM(
            LLM(loaded(), drafter="lookup", policy=Fixed(3), max_num_seqs=3, adapters={"one": folders["one"]})
        )

        async def answer(name: str) -> list[int]:
            asked = LoRARequest("two", 2, folders["two"]) if name == "two" else None
            own = params(name) if name == "one" else SAMPLED
            return [
                t
                async for part in engine.generate(REPEATING, own, lora_request=asked)
                for t in part.outputs[0].token_ids
            ]

        try:
            return await asyncio.gather(*map(answer, NAMES * 3))
        finally:
            engine.shutdown()

    assert asyncio.run(ask()) == [expected(folders, name) for name in NAMES * 3]
