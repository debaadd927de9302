"""DFlash heads as their authors publish them (github.com/z-lab/dflash), read and written.

config.json   a Qwen3 config, block_size, and dflash_config: {mask_token_id, target_layer_ids}; id i names state i + 1
tensors       fc, hidden_norm, layers.*, norm; embeddings and output rows are the target's, whole

llama.cpp     see `heads.gguf`; the mask token is that of the tokenizer
"""

from dataclasses import KW_ONLY
from typing import Annotated

import torch
from pydantic import Field

from ...schema import checked
from ..heads.gguf import ENGINE as LLAMA_CPP
from ..heads.gguf import MASK, Entries, contradicts, file_layout, read_parts
from ..heads.parts import Count, States, Vocabulary, check_sizes
from ..heads.published import (
    Layout,
    Published,
    TargetFacts,
    lacks,
    refuse_if,
    renamed,
    stored_weights,
    vllm_command,
)
from ..heads.published_options import PublishedLayers, joined, layer_fields, layers_config, said
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


@checked
class _Entries(Entries):
    """What the metadata of a GGUF file says."""

    _: KW_ONLY
    block_size: Count | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None


_OWN = {"hidden_norm": "enc.output_norm"}


def read(published: Published, target: TargetFacts, engine: str | None) -> DFlashHead | None:
    """A DFlash head; None for files of another method.

    Raises `IncompatibleModels` for one of DFlash-2, Domino or DSpark, or with sliding attention.
    """
    if published.file is not None:
        return _read_file(published, target) if published.architecture == "dflash" else None
    if "dflash_config" not in published.config:
        return None
    outer = {key: value for key, value in published.config.items() if key != "dflash_config"}
    published.config = joined(published.name, outer, published.config["dflash_config"], "dflash_config")
    kinds = [str(name) for name in published.config.get("architectures") or ["DFlashDraftModel"]]
    if others := [f"architecture {name}" for name in kinds if name != "DFlashDraftModel"]:
        raise lacks(published, "DFlash", ", ".join(others), _READ)
    options = said(published, _DFlash, "DFlash", _READ)
    if options.draft_vocab_size not in (None, options.vocab_size):
        raise lacks(published, "DFlash", f"draft_vocab_size {options.draft_vocab_size}", "the whole vocabulary")
    message = f"the head at {str(published.folder)!r} is for another target"
    fix = "name the one that it was trained for"
    layers = options.num_target_layers or target.num_layers
    check_sizes(message, {"num_layers": layers}, {"num_layers": target.num_layers}, fix)
    published.tensors = renamed(published.tensors, lambda name: name.removeprefix("model."), published.folder)
    config = DFlashConfig(
        **layer_fields(published, options, "DFlash"), draft_vocab_size=options.vocab_size, qk_norm=True,
        states=tuple(layer + 1 for layer in options.target_layer_ids),
        mask_token_id=options.mask_token_id, block_size=options.block_size,
    )  # fmt: skip
    return published.build(DFlashHead, config, torch.arange(options.vocab_size))


def _read_file(published: Published, target: TargetFacts) -> DFlashHead:
    assert published.file is not None
    parts = read_parts(published, _Entries, _OWN, target, more={"mask_token_id": published.file.metadata.get(MASK)})
    told = parts.entries
    if parts.owns_embeddings or told.target_hidden_size not in (None, told.hidden_size):
        raise parts.lacks("embeddings, or a width, of its own", "the target's")
    if told.block_size is None or told.mask_token_id is None:
        raise contradicts(published, f"no block_size or no {MASK}", "both")
    block_fields = {"block_size": told.block_size, "mask_token_id": told.mask_token_id, "qk_norm": True}
    return parts.build(DFlashHead, DFlashConfig(**block_fields, **parts.fields))


def layout(head: DFlashHead, engine: str, facts: TargetFacts, num_tokens: int) -> Layout:
    """The export of a DFlash head. Raises `NotExportable` for what the engine lacks."""
    c, kind = head.config, "a DFlash head"
    if engine == LLAMA_CPP:
        refuse_if(not c.qk_norm, engine, f"{kind} without norms of queries and keys")
        more = {"block_size": c.block_size, MASK: c.mask_token_id}
        return file_layout("dflash", head, facts, _OWN, more, c.num_speculative_tokens)
    refuse_if(c.own_lm_head, engine, f"{kind} with output rows of its own", "export it for llama.cpp")
    is_qwen3 = c.qk_norm and not c.attention_bias
    refuse_if(not is_qwen3, engine, f"{kind} whose layers are not Qwen3's", "train it with head.qk_norm=true")
    refuse_if(min(c.states) == 0, engine, f"{kind} that reads the embeddings", "train one that reads later states")
    refuse_if(max(c.states) >= facts.num_layers, engine, f"state {max(c.states)}, behind the final norm here")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **layers_config(c, facts),
        "attention_bias": c.attention_bias,
        "block_size": c.block_size,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "num_target_layers": facts.num_layers,
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
