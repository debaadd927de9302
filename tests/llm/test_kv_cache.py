"""Answers of a model whose cached keys and values are rounded: those of plain decoding with such a cache."""

from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.kernels import load
from tests.helpers import REPEATING, loaded, on_torch, prompt
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(load().library is None, reason=f"no native kernels here: {load().reason}")

PROMPTS = [REPEATING * 3, prompt(70, 1), REPEATING * 3 + prompt(9, 2), prompt(3)]
SAMPLED = SamplingParams(temperature=0.9, max_tokens=40, seed=7, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def answers(kv_cache_dtype: Any, params: SamplingParams, **how: Any) -> list[list[int]]:
    llm = LLM(loaded("llama", torch.bfloat16), kv_cache_dtype=kv_cache_dtype, max_num_seqs=3, **how)
    first = [one.token_ids for one in llm.generate(PROMPTS, params)]
    again = [one.token_ids for one in llm.generate(PROMPTS, params)]  # over cached prefixes
    assert first == again
    return first


@pytest.mark.parametrize("drafter", ["lookup", "recycling", "self-int4"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.more)])
def test_drafts_change_no_answer(form, params, drafter):
    """Of trees and of a draft that shares the cache, in a batch, over cached prefixes, in whole and single prompts."""
    plain = answers(form, params)
    assert answers(form, params, drafter=drafter, prefix_cache_bytes=1 << 24) == plain
    one = LLM(loaded("llama", torch.bfloat16), kv_cache_dtype=form, max_num_seqs=1)
    assert [one.generate([p], params)[0].token_ids for p in PROMPTS] == plain


def test_the_mode_has_a_name_and_other_scores():
    plain = LLM(loaded("llama", torch.bfloat16))
    rounded = LLM(loaded("llama", torch.bfloat16), kv_cache_dtype="int8")
    assert rounded.loaded.name == f"{plain.loaded.name}-kv-int8"
    assert LLM(loaded("llama", torch.bfloat16), kv_cache_dtype="auto").loaded.kv_dtype is None


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_what_has_no_such_cache_is_refused(form):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*layers of transformers"):
        LLM(on_torch(tiny_model("llama")), kv_cache_dtype=form)
    with pytest.raises(ConfigError, match="which has no attention"):
        LLM(loaded("mamba2"), kv_cache_dtype=form)
