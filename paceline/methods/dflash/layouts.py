"""DFlash heads as their authors publish them (github.com/z-lab/dflash), read and written.

config.json   a Qwen3 config, block_size, and dflash_config: {mask_token_id, target_layer_ids}; id i names state i + 1
tensors       fc, hidden_norm, layers.*, norm; embeddings and output rows are the target's, whole
"""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field

from ...schema import checked
from ..heads.parts import Count, States, Vocabulary, check_sizes
from ..heads.published import (
    CONTEXT,
    Layout,
    Published,
    TargetFacts,
    lacks,
    refuse_if,
    renamed,
    stored_weights,
    vllm_command,
)
from ..heads.published_options import PublishedLayers, joined, layer_fields, said
from .head import DFlashConfig, DFlashHead


@checked
class _DFlash(PublishedLayers):
    """What config.json of a DFlash head says."""

    _: KW_ONLY
    block_size: Annotated[int, Field(ge=2)]
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: States
    num_target_layers: Count | None = None
    draft_vocab_size: Vocabulary | None = None


_READ = "the form of z-lab/Qwen3-8B-DFlash-b16"


def read_dflash(published: Published, target: TargetFacts) -> DFlashHead:
    """A DFlash head. Raises `IncompatibleModels` for one of DFlash-2, Domino or DSpark, or with sliding attention."""
    outer = {key: value for key, value in published.config.items() if key != "dflash_config"}
    published.config = joined(published.name, outer, published.config["dflash_config"], "dflash_config")
    kinds = [str(name) for name in published.config.get("architectures") or ["DFlashDraftModel"]]
    if others := [f"architecture {name}" for name in kinds if name != "DFlashDraftModel"]:
        raise lacks(published, "DFlash", ", ".join(others), _READ)
    options = said(published, _DFlash, "DFlash", _READ)
    if options.draft_vocab_size not in (None, options.vocab_size):
        raise lacks(published, "DFlash", f"draft_vocab_size {options.draft_vocab_size}", "the whole vocabulary")
    what, fix = f"the head at {str(published.folder)!r} is for another target", "name the one that it was trained for"
    layers = options.num_target_layers or target.num_layers
    check_sizes(what, {"num_layers": layers}, {"num_layers": target.num_layers}, fix)
    published.tensors = renamed(published.tensors, lambda name: name.removeprefix("model."), published.folder)
    config = DFlashConfig(
        **layer_fields(published, options, "DFlash"), draft_vocab_size=options.vocab_size, qk_norm=True,
        states=tuple(layer + 1 for layer in options.target_layer_ids),
        mask_token_id=options.mask_token_id, block_size=options.block_size,
    )  # fmt: skip
    return published.build(DFlashHead, config, torch.arange(options.vocab_size))


_WRITTEN = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "block_size", "rms_norm_eps", "rope_theta", "rope_scaling", "attention_bias",
)  # fmt: skip
"""Fields of `DFlashConfig` that config.json has by the same names."""


def dflash_layout(head: DFlashHead, engine: str, facts: TargetFacts) -> Layout:
    """The export of a DFlash head for vLLM or SGLang. Raises `NotExportable` for what they lack."""
    c, what = head.config, "a DFlash head"
    refuse_if(engine == "speculators", engine, what, "export it for vllm or sglang")
    refuse_if(c.own_lm_head, engine, f"{what} with output rows of its own", "export it for llama.cpp")
    is_qwen3 = c.qk_norm and not c.attention_bias
    refuse_if(not is_qwen3, engine, f"{what} whose layers are not Qwen3's", "train it with head.qk_norm=true")
    refuse_if(min(c.states) == 0, engine, f"{what} that reads the embeddings", "train one that reads later states")
    refuse_if(max(c.states) >= facts.num_layers, engine, f"state {max(c.states)}, behind the final norm here")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{name: getattr(c, name) for name in _WRITTEN},
        "rope_parameters": {**(c.rope_scaling or {"rope_type": "default"}), "rope_theta": c.rope_theta},
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "num_target_layers": facts.num_layers,
        "max_position_embeddings": facts.context or CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": [state - 1 for state in c.states]},
    }
    notes = [f"{engine} drafts a chain of the most probable tokens, not a tree."]
    if c.draft_vocab_size < c.vocab_size:
        notes.append(
            f"{engine} knows no draft vocabulary of DFlash heads: it drafts over all {c.vocab_size} tokens with the "
            f"target's output rows, where Paceline drafts over {c.draft_vocab_size}."
        )
    if c.window is not None:
        notes.append(f"{engine} reads all states of a text, where Paceline reads the last {c.window}.")
    serve = vllm_command("dflash", c.num_speculative_tokens)
    if engine == "sglang":
        serve = "python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        serve += "--speculative-draft-model-path {folder}"
    return Layout(config, stored_weights(head), serve, tuple(notes))
