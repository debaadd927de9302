"""The methods of Paceline and of installed packages. CONTRIBUTING.md explains how to add one."""

import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError
from .method import Method

_LOG = logging.getLogger("paceline")
HEAD, _TRAINED = "head:PATH_OR_NAME", "a trained head"
_WHOLE = "drafts over the whole vocabulary there"
_TREES = "a dynamic tree, a fixed tree or a chain"

METHODS: Mapping[str, Method] = MappingProxyType({row.name: row for row in (
    Method(
        name="none", usage="none", title="plain decoding", how="without drafts", drafts="nothing",
        home=".plain", spec="PlainSpec", drafter="Plain",
    ),
    Method(
        name="ngram", usage="lookup", title="prompt lookup", how="what followed the same words before",
        papers="Saxena 2023", home=".lookup", spec="LookupSpec", drafter="PromptLookup", is_tried=True,
    ),
    Method(
        name="suffix", usage="suffix[:CORPUS]", title="suffix decoding", drafts="a tree",
        how="all that followed the same words before, here, in a corpus or in earlier answers",
        needs="nothing; a corpus if you have one",
        papers="arXiv 2411.04975, SAM-Decoding 2411.10666, REST 2311.08252",
        home=".suffix.drafter", spec="SuffixSpec", drafter="Suffix", is_tried=True,
    ),
    Method(
        name="prediction", usage="prediction", title="Predicted Outputs", how="the answer that a request predicts",
        needs="requests with a [prediction](#predicted-outputs)", papers="OpenAI's API",
        home=".prediction", spec="PredictedOutputSpec", drafter="PredictedOutput",
    ),
    Method(
        name="token_recycling", usage="recycling", title="Token Recycling", drafts="a tree",
        how="what the model found likely after the same token before",
        needs="nothing; 32 bytes of memory for each token of the vocabulary", papers="arXiv 2408.08696",
        home=".recycling", spec="RecyclingSpec", drafter="TokenRecycling", is_tried=True,
    ),
    Method(
        name="jump_forward", usage="jump-forward", title="jump-forward",
        how="what structured_outputs leave no choice about",
        needs="requests with [`structured_outputs`](coming_from.md#structured-outputs)",
        papers="SGLang, arXiv 2312.07104", home=".jump_forward", spec="JumpForwardSpec", drafter="JumpForward",
    ),
    Method(
        name="lookahead", usage="lookahead", title="Lookahead decoding", drafts="a tree",
        how="n-grams from a window beside each pass", papers="arXiv 2402.02057",
        home=".lookahead", spec="LookaheadSpec", drafter="Lookahead",
    ),
    Method(
        name="self_int4", usage="self-int4[:FOLDER]", title="self-draft",
        how="the model's own layers in INT4, INT3 or INT2, on its own cache", papers="QSpec, arXiv 2410.11305",
        home=".self_int4.drafter", spec="SelfInt4Spec", drafter="SelfQuantized", is_tried=True,
        head=".self_int4.head:Int4Draft", recipe=".self_int4.recipe:QatRecipe", trained_as="qat",
    ),
    Method(
        name="self_skip", usage="self-skip[:FRACTION_OR_FILE]", title="self-draft with skipped layers",
        how="the model without some of its attention layers and MLPs, on its own cache",
        papers="KnapSpec, arXiv 2602.20217; Draft & Verify 2309.08168, SWIFT 2410.06916",
        home=".self_skip.drafter", spec="SelfSkipSpec", drafter="SelfSkip",
    ),
    Method(
        name="self_top1", usage="self-top1", title="self-draft of a mixture",
        how="the model's own layers with one expert a token, or a few, on its own cache", needs="a mixture of experts",
        home=".self_experts", spec="SelfTop1Spec", drafter="SelfExperts",
    ),
    Method(
        name="draft_model", usage="model:PATH_OR_ID[@int4]", title="draft model", how="a smaller model",
        needs="a smaller model, best with the same tokenizer",
        papers="arXiv 2211.17192, 2302.01318; DistillSpec 2310.08461; with another tokenizer 2502.05202",
        home=".draft_model.drafter", spec="DraftModelSpec", drafter="DraftModel",
        recipe=".draft_model.recipe:DistillRecipe", trained_as="distill",
    ),
    Method(
        name="ouroboros", usage="ouroboros:model:PATH_OR_ID[@int4]", title="Ouroboros",
        drafts="a chain and phrases after it", how="a smaller model, and phrases of its rejected drafts",
        needs="a smaller model, best with the same tokenizer", papers="arXiv 2402.13720",
        home=".ouroboros", spec="OuroborosSpec", drafter="Ouroboros",
    ),
    Method(
        name="eagle", usage=HEAD, title="EAGLE-1 and -2", drafts=_TREES, needs=_TRAINED,
        how="one layer over the last hidden states", papers="arXiv 2401.15077, 2406.16858",
        home=".eagle.drafter", spec="EagleSpec", drafter="Eagle",
        head=".eagle.head:EagleHead", recipe=".eagle.recipe:EagleRecipe", marks=("hidden_size",),
        layouts=".eagle.layouts", exports={"vllm": _WHOLE, "sglang": "`hot_tokens.pt` is the draft vocabulary"},
    ),
    Method(
        name="eagle3", usage=HEAD, title="EAGLE-3 and -3.1", drafts=_TREES, needs=_TRAINED,
        how="one layer over the hidden states of three depths, trained over several of its own steps",
        papers="arXiv 2503.01840, 2605.09992", home=".eagle.drafter", spec="Eagle3Spec", drafter="Eagle",
        head=".eagle.head:EagleHead", recipe=".eagle.recipe:EagleRecipe",
        marks=(
            "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type",
            "architectures=Eagle3",
        ),
        layouts=".eagle.layouts",
        exports={
            "vllm": "", "sglang": "unless `norm_before_residual`, `norm_before_fc` or several layers",
            "speculators": "", "llama.cpp": "of one layer, EAGLE-3 alone",
        },
    ),
    Method(
        name="peagle", usage=HEAD, title="P-EAGLE", drafts=f"{_TREES}, from one pass", needs=_TRAINED,
        how="EAGLE-3's layer with masks for the tokens ahead", papers="arXiv 2602.01469",
        home=".eagle.drafter", spec="PEagleSpec", drafter="Eagle",
        head=".eagle.head:EagleHead", recipe=".eagle.recipe:EagleRecipe",
        marks=("speculators_model_type=peagle", "mask_token_id", "ptd_token_id", "pard_token"),
        layouts=".eagle.layouts", exports={"vllm": 'with `"parallel_drafting": true`', "speculators": ""},
    ),
    Method(
        name="dflash", usage=HEAD, title="DFlash", drafts=f"{_TREES}, from one pass", needs=_TRAINED,
        how="a few layers over several hidden states, which fill a block of masks",
        papers="arXiv 2602.06036, its trees DDTree 2604.12989",
        home=".dflash.drafter", spec="DFlashSpec", drafter="DFlash",
        head=".dflash.head:DFlashHead", recipe=".dflash.recipe:DFlashRecipe",
        marks=("dflash_config", "speculators_model_type=dflash"), layouts=".dflash.layouts",
        exports={"vllm": _WHOLE, "sglang": _WHOLE, "speculators": "", "llama.cpp": ""},
    ),
    Method(
        name="jetspec", usage=HEAD, title="JetSpec", drafts=f"{_TREES}, from two passes", needs=_TRAINED,
        how="DFlash's layers, causal in a block: the second pass reads the tokens that the first one drafted",
        papers="arXiv 2606.18394", home=".dflash.jetspec", spec="JetSpecSpec", drafter="JetSpec",
        head=".dflash.head:DFlashHead", recipe=".dflash.recipe:DFlashRecipe",
        marks=("dflash_config='causal': True", "dflash_config='causal_head': True"),
        layouts=".dflash.layouts", exports={"vllm": f"a causal DFlash head; {_WHOLE}"},
    ),
    Method(
        name="dspark", usage=HEAD, title="DSpark", drafts=f"{_TREES}, from one pass", needs=_TRAINED,
        how="DFlash's block, whose rows are told the token before them", papers="arXiv 2607.05147",
        home=".dspark.drafter", spec="DSparkSpec", drafter="DSpark",
        head=".dspark.head:DSparkHead", recipe=".dspark.recipe:DSparkRecipe",
        marks=("speculators_model_type=dspark", "architectures=Qwen3DSparkModel"), layouts=".dspark.layouts",
    ),
    Method(
        name="mtp", usage="mtp[:PATH_OR_NAME]", title="MTP", drafts=_TREES,
        needs="a checkpoint with an [MTP module](heads.md#modules-that-come-with-the-model), or a trained head",
        how="one layer over the last hidden states, in DeepSeek-V3's form",
        papers="DeepSeek-V3, arXiv 2412.19437; FastMTP 2509.18362",
        home=".eagle.drafter", spec="MtpSpec", drafter="Eagle",
        head=".eagle.head:EagleHead", recipe=".eagle.recipe:EagleRecipe",
    ),
    Method(
        name="gemma4_assistant", usage=HEAD, title="Gemma 4 assistants", drafts=_TREES,
        needs="Gemma 4 and its assistant", how="a few layers that attend to the target's own keys and values",
        home=".assistant", spec="Gemma4AssistantSpec", drafter="Gemma4Assistant",
        marks=("model_type=gemma4_assistant", "model_type=gemma4_unified_assistant"),
    ),
    Method(
        name="medusa", usage=HEAD, title="Medusa", drafts="a tree", needs=_TRAINED,
        how="parallel heads over the last hidden state", papers="arXiv 2401.10774",
        home=".parallel.drafter", spec="MedusaSpec", drafter="Medusa",
        head=".parallel.head:MedusaHead", recipe=".parallel.recipe:ParallelRecipe",
        marks=("model_type=medusa", "medusa_num_heads"), layouts=".parallel.layouts", exports={"vllm": ""},
    ),
    Method(
        name="blockwise", usage=HEAD, title="blockwise decoding", needs=_TRAINED,
        how="parallel heads over the last hidden state", papers="Stern et al. 2018, arXiv 1811.03115",
        home=".parallel.drafter", spec="BlockwiseSpec", drafter="Blockwise",
        head=".parallel.head:BlockwiseHead", recipe=".parallel.recipe:ParallelRecipe",
    ),
    Method(
        name="space", usage=HEAD, title="SPACE", drafts="a tree or a chain", needs="a trained adapter",
        how="mask tokens in the model's own pass", papers="arXiv 2402.11809",
        home=".space.drafter", spec="SpaceSpec", drafter="Space",
        head=".space.adapter:SpaceAdapter", recipe=".space.recipe:SpaceRecipe",
    ),
    Method(
        name="choose", usage="DRAFTER+DRAFTER", title="several", how="the best of them, per request and round",
        drafts="what its members draft", needs="what its members need",
        home=".choose", spec="ChooseSpec", drafter="Choose",
    ),
)})  # fmt: skip
"""The rows by name. Later ones are special cases of earlier ones where both fit a published head."""


def methods() -> tuple[str, ...]:
    """The names of all methods: ours first, then those of installed packages."""
    return tuple(dict.fromkeys([*METHODS, *_installed()]))


def method_named(name: str) -> Method:
    """The row of a method. Raises `ConfigError` for an entry point that cannot be loaded."""
    if name in METHODS:
        return METHODS[name]
    entry = _installed()[name]
    try:
        loaded: Any = entry.load()
    except Exception as error:
        raise ConfigError(f"the drafter {name!r} cannot be loaded", got=repr(error), fix=entry.value) from error
    if isinstance(loaded, Method):
        return loaded
    if not isinstance(loaded, type):
        expected = "a Method, or a DrafterSpec"
        raise ConfigError(f"the drafter {name!r} has no options", got=entry.value, expected=expected)
    title, drafter = (loaded.__doc__ or "").partition("\n")[0], getattr(loaded, "drafter", loaded).__name__
    row = {"home": entry.module, "spec": entry.attr, "drafter": drafter}
    return Method(name=name, usage=name, title=title, is_tried=True, **row)


def rows() -> list[Method]:
    """The rows of all methods. One of an installed package that cannot be loaded is left out with a warning."""
    loaded: list[Method] = []
    for name in methods():
        try:
            loaded.append(method_named(name))
        except ConfigError as error:
            _LOG.warning("%s", error)
    return loaded


def trained() -> dict[str, Method]:
    """The methods that `paceline train` knows, by the name that they have there."""
    return {row.trained_as or row.name: row for row in rows() if row.recipe}


def trained_method(name: str) -> Method:
    """The method that `paceline train` knows by this name. Raises `ConfigError`."""
    known = trained()
    if name not in known:
        raise ConfigError("unknown method of training", got=repr(name), expected="one of " + ", ".join(known))
    return known[name]


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="paceline.drafters") if entry.name not in METHODS}
