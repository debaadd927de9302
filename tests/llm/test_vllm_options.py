"""What becomes of vLLM's options in Python, and that a suggestion never has another meaning."""

import asyncio
import inspect
import logging
import re
from ast import literal_eval
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, Fixed, PromptLookup, SamplingParams
from paceline.config import parse
from paceline.errors import ConfigError
from paceline.integrations.vllm_options import ENGINE, SERVER, Option, settle
from paceline.schema import meant
from tests.helpers import REPEATING, loaded, tokenizer
from tests.other_engines import CONSTRUCTOR, FURTHER, USUAL
from tests.tiny import tiny_model

HARMLESS = {
    "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "enforce_eager": True, "quantization": None,
    "swap_space": 4, "max_num_batched_tokens": 8192, "disable_log_stats": False, "load_format": "auto",
    "cpu_offload_gb": 0, "hf_overrides": {}, "enable_lora": False, "block_size": 16,
    "distributed_executor_backend": "mp", "limit_mm_per_prompt": {"image": 1}, "task": "generate",
}  # fmt: skip


def llm(**options) -> LLM:
    return LLM(loaded("llama"), drafter=PromptLookup(), policy=Fixed(4), max_num_seqs=2, **options)


def test_vllms_usual_options_are_ours_or_in_the_table():
    known = {*inspect.signature(LLM).parameters, *ENGINE}
    missing = [name for name in (*CONSTRUCTOR, *USUAL) if name not in known]
    assert missing == ["chat_template", "quantization_config", "spec_method", "spec_model", "spec_tokens"]
    for name in missing:  # by what they are in Python
        with pytest.raises(ConfigError, match=f"takes no '{name}'. Fix: "):
            llm(**{name: "x"})


def test_what_changes_nothing_is_accepted_with_one_line(caplog):
    with caplog.at_level(logging.WARNING, "paceline"):
        made = llm(**HARMLESS)
    (line,) = [one.getMessage() for one in caplog.records if one.name == "paceline"]
    assert (
        line
        == f"LLM: these options change nothing here: {', '.join(one for one in HARMLESS if HARMLESS[one] is not None)}."
    )
    params = SamplingParams(max_tokens=8)
    assert made.generate(REPEATING, params)[0].token_ids == llm().generate(REPEATING, params)[0].token_ids
    parse({"method": "ngram", "draft_tensor_parallel_size": 1, "enforce_eager": True})
    assert AsyncLLM(llm(), enforce_eager=True, enable_prefix_caching=False).llm.runner.prefixes.max_bytes == 0


def test_what_matters_is_refused_all_at_once():
    given = {"tensor_parallel_size": 2, "quantization": "awq", "enable_sleep_mode": True, "load_format": "dummy"}
    with pytest.raises(ConfigError) as told:
        llm(**HARMLESS | given, max_num_sequences=3)
    words = "tensor_parallel_size=2", "give weights", "end the process", "load_format='dummy'", ": max_num_seqs"
    for word in words:
        assert word in str(told.value)
    with pytest.raises(ConfigError, match=r"give it to LLM.*give it to LLM"):
        AsyncLLM(llm(), max_num_seqs=3, dtype="auto")
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size=2, 'more'"):
        parse({"method": "ngram", "draft_tensor_parallel_size": 2, "more": 1})


def test_what_has_another_name_here_is_honoured():
    assert llm(enable_prefix_caching=True).runner.prefixes.keeps_text
    assert llm(enable_prefix_caching=False).runner.prefixes.max_bytes == 0
    with pytest.raises(ConfigError, match="fp8"):
        llm(quantization="fp8")  # as weights="fp8", which needs CUDA
    for name, ours in (("hf_token", "token"), ("download_dir", "cache_dir")):
        with pytest.raises(ConfigError, match=f"{ours} is for models that are loaded by name"):
            LLM(tiny_model("llama"), **{name: "x"})
    with pytest.raises(ConfigError, match=r"takes no 'enable_prefix_caching'.*prefix_cache_bytes"):
        llm(enable_prefix_caching=True, prefix_cache_bytes=1)
    assert llm(generation_config="vllm").get_default_sampling_params() == SamplingParams()


def test_each_option_is_settled_by_its_value():
    table = {"a": Option(), "b": Option("leave it out", (1,)), "c": "another"}
    settled = settle({"a": 3, "b": 1, "c": None}, table, ())
    assert (settled.idle, settled.refused) == (["a", "b"], {})
    assert settle({"b": 2, "c": 0}, table, ()).refused == {"b": "leave it out", "c": "another"}
    for off in (None, False, "", {}, []):
        assert not settle({"b": off}, table, ()).refused
    assert settle({"b": 0}, table, ()).refused
    assert not ENGINE.keys() & SERVER.keys() - {"limit_mm_per_prompt"}


def test_the_table_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| (accepted|refused)(.*?) \| (.*) \|$", page, re.M)
    assert [verdict for verdict, *_ in rows] == ["accepted"] * 3 + ["refused"]
    for verdict, _, cell in rows:
        for name, value in re.findall(r"`(\w+)=(.*?)`", cell):
            settled = settle({name: literal_eval(value)}, ENGINE | SERVER, inspect.signature(LLM).parameters)
            assert bool(settled.refused) is (verdict == "refused"), name


def test_metrics_and_the_prefix_cache():
    made = LLM(tiny_model("llama"), tokenizer=tokenizer(), drafter=PromptLookup(), policy=Fixed(4),
               prefix_cache_bytes=1 << 20)  # fmt: skip
    params, text = SamplingParams(max_tokens=9, ignore_eos=True), "abcabcab" * 6
    results = [*made.generate([text, "xyz"], params), *made.generate(text, params)]
    assert list(made.stream("xyz", params))[-1].completion
    counts = {one.name: getattr(one, "values", None) or one.value for one in made.get_metrics()}
    assert counts["vllm:generation_tokens"] == 36
    assert counts["vllm:prompt_tokens"] == 2 * (len(made.encode(text)) + len(made.encode("xyz")))
    assert counts["vllm:prefix_cache_hits"] == results[2].num_cached_tokens > 0
    rounds = [one for result in results for one in result.rounds]
    assert counts["vllm:spec_decode_num_draft_tokens"] >= sum(one.num_nodes for one in rounds) > 0
    assert counts["vllm:spec_decode_num_accepted_tokens"] == sum(counts["vllm:spec_decode_num_accepted_tokens_per_pos"])
    assert made.plain().get_metrics()[0].value == 0
    assert made.reset_prefix_cache() is True
    assert made.runner.prefixes.num_bytes == 0
    assert made.generate(text, params)[0].num_cached_tokens == 0
    engine = AsyncLLM(made)
    assert engine.get_tokenizer() is made.tokenizer
    assert asyncio.run(engine.reset_prefix_cache()) is True
    engine.shutdown()
    assert made.runner.prefixes.num_bytes == 0


def test_a_suggestion_never_has_another_meaning():
    """What `meant` says for names of others: nothing, unless it is listed here."""
    found = {}
    for place in (SamplingParams, LLM, LLM.generate, LLM.chat):
        known = list(inspect.signature(place).parameters)
        for name in (*FURTHER, *CONSTRUCTOR, *USUAL, *ENGINE, *SERVER):
            if name not in known and (said := meant(name, known)):
                found[name] = said
    assert found == {}


@pytest.mark.parametrize(
    ("word", "known", "other"),
    [
        ("temprature", ["temperature"], "temperature"),
        ("max_num_seq", ["max_num_seqs"], "max_num_seqs"),
        ("costmodel", ["cost_model"], "cost_model"),
        ("--max_model_len", ["--max-model-len"], "--max-model-len"),
        ("top_k", ["top_p"], None),
        ("min_p", ["top_p", "min_k"], None),
        ("length_penalty", ["presence_penalty"], None),
        ("int8", ["int4"], None),
    ],
)
def test_a_misspelling_is_told_from_another_word(word, known, other):
    assert meant(word, known) == (other and f"did you mean {other!r}?")
