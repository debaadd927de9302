"""What is refused is refused early, by name, with the reason and the way out."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)

from paceline import LLM, Coupled, DraftModel, Fixed, PromptLookup, SamplingParams, Typical
from paceline.core.draft import Draft
from paceline.core.interfaces import DrafterInfo
from paceline.core.tree import TokenTree
from paceline.engine.loop import SpeculativeDecoder
from paceline.errors import ConfigError, DraftError, IncompatibleModels, LossyNotAllowed, NumericsError
from paceline.target import ModelRunner, wrap_model
from tests.adversaries import Adversary, chain
from tests.helpers import REPEATING, all_free, loaded, tokenizer
from tests.tiny import SMALL, tiny_model

STATE = "cannot forget rejected tokens"
REFUSED = {
    "rwkv": ({"vocab_size": 97, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}, STATE),
    "recurrent_gemma": ({**SMALL, "num_hidden_layers": 3, "lru_width": 32}, STATE),
    "xlstm": ({"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}, "cache of its own kind"),
    "bloom": ({"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ({"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4}, "ALiBi"),
    "deepseek_v32": (SMALL, "indexed_attention layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_cannot_be_decoded_in_trees(name):
    options, reason = REFUSED[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options))
    with pytest.raises(IncompatibleModels, match=reason) as caught:
        LLM(model)
    assert name.split("_")[0] in str(caught.value)


def test_falcon_with_alibi():
    with pytest.raises(IncompatibleModels, match="ALiBi"):
        LLM(tiny_model("falcon", alibi=True))


def test_encoder_and_decoder(tmp_path):
    config = T5Config(vocab_size=97, d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=4)
    with pytest.raises(IncompatibleModels, match="not a causal language model"):
        LLM(T5ForConditionalGeneration(config))
    config.save_pretrained(tmp_path)
    with pytest.raises(IncompatibleModels, match="'t5'"):
        LLM(str(tmp_path))


def test_models_that_only_see(tmp_path):
    ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32).save_pretrained(
        tmp_path
    )
    with pytest.raises(IncompatibleModels, match="not a causal language model"):
        LLM(str(tmp_path))


def test_models_of_images_without_weights(tmp_path):
    LlavaConfig(vision_config=CLIPVisionConfig().to_dict(), text_config=LlamaConfig(**SMALL).to_dict()).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=r"weights.*cannot be read"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights(value):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5, 3] = value
    with pytest.raises(NumericsError, match=r"NaN or infinite logits.*dtype"):
        LLM(model)


@pytest.mark.parametrize("place", ["nowhere", "an empty folder"])
def test_models_that_are_not_there(place, tmp_path):
    with pytest.raises(ConfigError):
        LLM(str(tmp_path if place == "an empty folder" else tmp_path / "none"))


# Drafters that break the contract


def raw(tokens, parents, probes=None) -> Draft:
    return Draft(TokenTree.from_lists([tokens], [parents], probes=probes and [probes]), source="culprit")


ROOT = REPEATING[-1]
BROKEN = {
    "token too large": (lambda: raw([ROOT, 97], [-1, 0]), "outside the vocabulary"),
    "token negative": (lambda: raw([ROOT, -1], [-1, 0]), "outside the vocabulary"),
    "another root": (lambda: raw([ROOT - 1, 5], [-1, 0]), "node 0"),
    "root a probe": (lambda: raw([ROOT, 5], [-1, 0], [True, False]), "node 0"),
    "root with a parent": (lambda: raw([ROOT, 5], [0, 0]), "node 0"),
    "parent behind its child": (lambda: raw([ROOT, 5, 6], [-1, 2, 0]), "precede"),
    "its own parent": (lambda: raw([ROOT, 5], [-1, 1]), "precede"),
    "parent negative": (lambda: raw([ROOT, 5], [-1, -1]), "precede"),
    "candidate under a probe": (lambda: raw([ROOT, 5, 6], [-1, 0, 1], [False, True, False]), "a probe as its parent"),
    "too deep": (lambda: raw([ROOT, 5, 6, 7, 8], [-1, 0, 1, 2, 3]), "too deep"),
}


class Breaks(Adversary):
    name = "culprit"

    def __init__(self, draft):
        self.draft = draft

    def propose(self, seqs, budgets):
        return self.draft()

    info = DrafterInfo(drafts_during_prefill=True)

    def nodes(self, seq, budget):
        return chain([])


@pytest.mark.parametrize("name", BROKEN)
def test_drafts_that_break_the_contract(name):
    draft, reason = BROKEN[name]
    llm = LLM(tiny_model("llama"), drafter=Breaks(draft), policy=Fixed(3, 16))
    with pytest.raises(DraftError, match=reason) as caught:
        llm.generate(REPEATING, SamplingParams(max_tokens=8))
    assert "culprit" in str(caught.value)
    assert all_free(llm.runner)
    assert len(llm.plain().generate(REPEATING, SamplingParams(max_tokens=8))[0].token_ids) == 8


def test_drafts_of_other_models():
    target = tiny_model("llama")
    with pytest.raises(IncompatibleModels, match="vocabularies differ in size"):
        LLM(target, drafter=DraftModel(loaded("llama", vocab_size=96)))
    own, other = wrap_model(target, tokenizer()), wrap_model(tiny_model("llama", seed=1), tokenizer(5))
    with pytest.raises(IncompatibleModels, match=r"another tokenizer.*does not spell"):
        LLM(target, tokenizer=tokenizer(), drafter=DraftModel(other))
    with pytest.raises(IncompatibleModels, match="target itself"):
        SpeculativeDecoder(ModelRunner(own), DraftModel(own), Coupled(), Fixed())


def test_a_draft_with_a_padded_vocabulary_fits():
    """The same token strings, and an output head padded to another size: that is no other tokenizer."""
    draft = wrap_model(tiny_model("llama", seed=1, vocab_size=128), tokenizer())
    llm = LLM(tiny_model("llama"), tokenizer=tokenizer(), drafter=DraftModel(draft))
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1)
    assert llm.generate("abc", params)[0].token_ids == llm.plain().generate("abc", params)[0].token_ids


def test_lossy_rules_need_consent_twice():
    with pytest.raises(LossyNotAllowed):
        Typical()
    with pytest.raises(LossyNotAllowed, match=r"typical.*allow_lossy=True"):
        LLM(tiny_model("llama"), verifier=Typical(allow_lossy=True))
    llm = LLM(tiny_model("llama"), verifier=Typical(allow_lossy=True), drafter=PromptLookup(), allow_lossy=True)
    answer = llm.generate(REPEATING, SamplingParams(temperature=1.0, max_tokens=6))[0]
    assert not answer.lossless
    assert not answer.outputs[0].exact
    assert llm.plain().generate(REPEATING, SamplingParams(max_tokens=3))[0].lossless
