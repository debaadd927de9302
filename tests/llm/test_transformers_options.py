"""Each option of transformers' `generate` has the effect that it has there, or is refused by name: the docs' table."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from paceline import hf_model
from paceline.errors import ConfigError
from paceline.integrations.custom_generate import generate
from tests.helpers import REPEATING, tokenizer
from tests.llm.test_custom_generate import PADDED, at_20, favour
from tests.tiny import tiny_model

DOCS = Path(__file__).parents[2] / "docs"
IDS = torch.tensor([REPEATING])
ENDS = {"eos_token_id": list(range(3, 60))}  # most tokens end an answer
WORDS = tokenizer()
FREE = 12  # tokens of an answer without options


def table() -> dict[str, str]:
    """What the docs say of each option."""
    page = (DOCS / "coming_from.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (honoured|no effect|refused) \|", page, re.M)
    return {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}


TABLE = table()
HAVE = set(inspect.signature(GenerationMixin.generate).parameters) | set(vars(GenerationConfig()))
"""What the installed transformers has."""
EFFECTS: dict[str, dict] = {  # against a call with max_new_tokens and the options behind the first
    "inputs": {"inputs": IDS.flip(1)},
    "input_ids": {"input_ids": IDS.flip(1)},
    "attention_mask": {"attention_mask": torch.tensor([[0] * 4 + [1] * 9])},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=5)},
    "logits_processor": {"logits_processor": LogitsProcessorList([favour])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([at_20])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [5 + len(ids) % 3, 40]},
    "stop_strings": {"stop_strings": list("abcdefgh"), "tokenizer": WORDS},
    "max_length": {"max_length": 18},
    "max_new_tokens": {"max_new_tokens": 5},
    "min_length": {"min_length": 20, **ENDS},
    "min_new_tokens": {"min_new_tokens": 8, **ENDS},
    "max_time": {"max_time": 0.0},
    "eos_token_id": ENDS,
    "pad_token_id": {"pad_token_id": 7, **PADDED, "eos_token_id": list(range(3, 20))},
    "bos_token_id": {"bos_token_id": 33, "input_ids": None},
    "forced_bos_token_id": {"forced_bos_token_id": 33, "input_ids": IDS[:, :1]},
    "forced_eos_token_id": {"forced_eos_token_id": 33},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[9], 99.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 9.0)},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(3, 50)]},
    "suppress_tokens": {"suppress_tokens": list(range(3, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": [token for token in range(97) if token != 40]},
    "sequence_bias": {"sequence_bias": [[[33], 9.0]]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
}
SAMPLED: dict[str, object] = {
    "do_sample": True,
    "temperature": 0.05,
    "top_k": 1,
    "top_p": 0.05,
    "min_p": 0.9,
    "top_h": 0.1,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.9,
    "eta_cutoff": 0.9,
}
WITHOUT_EFFECT: dict[str, object] = {
    "renormalize_logits": True,
    "use_cache": False,
    "max_cache_len": 64,
    "prefill_chunk_size": 4,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "early_stopping": True,
    "length_penalty": 2.0,
    "decoder_start_token_id": 5,
}
REFUSED: dict[str, object] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [object()],
    "force_words_ids": [[[5]]],
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "cache": DynamicCache(),
    "past_key_values": DynamicCache(),
    "cache_params": DynamicCache(),
    "cache_implementation": "static",
    "cache_config": {"nbits": 4},
    "inputs_embeds": torch.zeros(1, 4, 32),
    "position_ids": torch.arange(len(REPEATING))[None] + 3,
    "pixel_values": torch.zeros(1, 3, 32, 32),
    "guidance_scale": 2.0,
    "negative_prompt_ids": IDS,
    "negative_prompt_attention_mask": torch.ones_like(IDS),
    "dola_layers": "low",
    "penalty_alpha": 0.6,
    "low_memory": True,
    "token_healing": True,
    "remove_invalid_values": True,
    "use_mtp": True,
    "speculation_type": "dflash",
    "is_assistant": True,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "synced_gpus": True,
    "custom_generate": generate,
}
ELSEWHERE = {
    *("streamer", "tokenizer", "assistant_model", "assistant_tokenizer", "num_assistant_tokens"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_return_sequences", "return_dict_in_generate"),
}
"""Tried by tests of their own."""
INERT = {"transformers_version", "continuous_batching_config"}


def here(options) -> list[str]:
    """Those that the installed transformers has."""
    extra = {"input_ids", "attention_mask", "cache", "past_key_values", "cache_params", "inputs_embeds", "position_ids"}
    extra |= {"pixel_values"}
    return [name for name in options if name in HAVE | extra]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny_model("llama")
    made.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, bos_token_id=1)
    return made


@pytest.fixture(scope="module")
def fast(model) -> PreTrainedModel:
    return hf_model(model, drafter="lookup")


def ask(of: PreTrainedModel, **options) -> list[list[int]]:
    given = {"input_ids": IDS, "max_new_tokens": FREE, "do_sample": False, **options}
    if "inputs" in options:
        del given["input_ids"]
    if {"max_length", "generation_config"} & options.keys():
        del given["max_new_tokens"]
    return of.generate(**{name: value for name, value in given.items() if value is not None}).tolist()


def test_the_table_names_every_option_and_each_is_tried():
    assert HAVE - {"self", "kwargs", "_from_model_config"} <= set(TABLE)
    kinds = {
        "honoured": {*EFFECTS, *SAMPLED, *ELSEWHERE},
        "no effect": {*WITHOUT_EFFECT, *INERT},
        "refused": {*REFUSED},
    }
    assert {kind: {name for name, one in TABLE.items() if one == kind} for kind in kinds} == kinds


@pytest.mark.parametrize("name", here(EFFECTS))
def test_honoured_options_have_the_effect_that_they_have_in_transformers(model, fast, name):
    options = EFFECTS[name]
    got = ask(fast, **options)
    assert got == ask(model, **options)
    assert got != ask(model, **{key: value for key, value in options.items() if key != name})


@pytest.mark.parametrize("name", here(SAMPLED))
def test_sampling_options_have_an_effect(fast, name):
    base = {} if name == "do_sample" else {"do_sample": True, "top_k": 0}
    answers = []
    for options in (base, {**base, name: SAMPLED[name]}):
        torch.manual_seed(3)
        answers.append(ask(fast, **options))
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", here(WITHOUT_EFFECT))
def test_other_options_change_no_answer(model, fast, name):
    options = {name: WITHOUT_EFFECT[name]}
    assert ask(fast, **options) == ask(model, **options) == ask(model)


@pytest.mark.parametrize("name", here(REFUSED))
def test_refused_options_are_named(model, fast, name):
    options = {name: REFUSED[name]}
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        ask(fast, **options)
    if name in vars(GenerationConfig()):
        with pytest.raises(ConfigError, match=rf"\b{name}\b"):
            ask(fast, generation_config=GenerationConfig(**options))
    if name not in ("custom_generate", "token_healing"):  # transformers refuses the second, and what it does not know
        with pytest.raises(ValueError, match="cache" if "cache" in name or "past" in name else rf"\b{name}\b"):
            ask(model, **options, custom_generate=generate)
