"""DFlash heads as others publish them, read and written.

              their authors (github.com/z-lab/dflash)        speculators
config.json   a Qwen3 config, block_size, and                see `heads.speculators`: block_size, mask_token_id,
              dflash_config: {mask_token_id,                 aux_hidden_state_layer_ids; id i names state i
              target_layer_ids}; id i names state i + 1
              of JetSpec, causal (vLLM) or causal_head       refused: its rows are trained otherwise
tensors       fc, hidden_norm, layers.*, norm                the same, lm_head; d2t, t2d of a part of the vocabulary
embeddings    the target's                                   the target's, in the file or not

llama.cpp     see `heads.gguf`; the mask token is that of the tokenizer
"""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field

from ...schema import checked
from ..heads.gguf import ENGINE as LLAMA_CPP
from ..heads.gguf import MASK, Entries, contradicts, file_layout, read_parts
from ..heads.parts import Count, States, Vocabulary, Width, check_sizes
from ..heads.published import (
    Layout,
    Published,
    TargetFacts,
    check_states,
    draft_tables,
    ids_of_drafts,
    lacks,
    owns_table,
    refuse_if,
    renamed,
    stored_weights,
    target_rows,
    vllm_command,
)
from ..heads.published_options import PublishedLayers, joined, layer_fields, layers_config, said
from ..heads.speculators import ENGINE as SPECULATORS
from ..heads.speculators import KIND, flattened, nested
from .head import DFlashConfig, DFlashHead

_H = TypeVar("_H", bound=DFlashHead)


@checked
class DFlashOptions(PublishedLayers):
    """What config.json of a DFlash head says."""

    _: KW_ONLY
    block_size: Annotated[int, Field(ge=2)]
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: States | None = None
    aux_hidden_state_layer_ids: States | None = None
    num_target_layers: Count | None = None
    target_hidden_size: Width | None = None
    draft_vocab_size: Vocabulary | None = None
    causal: bool = False
    causal_head: bool = False


_READ = "the form of z-lab/Qwen3-8B-DFlash-b16"
_FAMILY = re.compile(r"DFlash|\w*DSpark|\w*Domino")  # architectures that derive from it


@checked
class _Entries(Entries):
    """What the metadata of a GGUF file says."""

    _: KW_ONLY
    block_size: Count | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None


_OWN = {"hidden_norm": "enc.output_norm"}


def read(published: Published, target: TargetFacts, engine: str | None) -> DFlashHead | None:
    """A DFlash or JetSpec head; None for files of another method.

    Raises `IncompatibleModels` for one of DFlash-2 or Domino, or with sliding attention.
    """
    if published.file is not None:
        return _read_file(published, target) if published.architecture == "dflash" else None
    if not _is_dflash(published.config):
        return None
    is_theirs = KIND in published.config
    published.config = flattened(published.config, ("dflash",), {}) if is_theirs else _joined(published)
    options = said(published, DFlashOptions, "DFlash", _READ, ("speculators_config",) if is_theirs else ())
    if is_theirs and (options.causal or options.causal_head):
        raise lacks(published, "DFlash", "causal true in speculators", "rows that see their whole block")
    return build(published, target, options, is_theirs, DFlashHead)


def build(
    published: Published, target: TargetFacts, options: DFlashOptions, is_theirs: bool, kind: type[_H], **more: Any
) -> _H:
    """The head of these options and tensors. is_theirs: in the layout of speculators. more: of its configuration."""
    states = options.aux_hidden_state_layer_ids if is_theirs else options.target_layer_ids
    if states is None or (options.aux_hidden_state_layer_ids and options.target_layer_ids):
        raise contradicts(published, "no states that the head reads, or two lists of them", "one list")
    states = tuple(state + (not is_theirs) for state in states)
    if is_theirs:  # its authors read the last state behind the final norm, as transformers counts
        check_states(published, states, target)
    _check_target(published, options, target)
    published.tensors = renamed(published.tensors, lambda name: name.removeprefix("model."), published.folder)
    ids, owns = torch.arange(options.vocab_size), False
    if is_theirs:
        ids = ids_of_drafts(published, options.draft_vocab_size or options.vocab_size, options.vocab_size)
        rows = None if target.lm_head is None else target.lm_head[ids.to(target.lm_head.device)]
        owns = owns_table(published, "lm_head.weight", len(ids), rows)
        if owns_table(published, "embed_tokens.weight", options.vocab_size, target.embeddings):
            raise lacks(published, "DFlash", "embeddings of its own", "the target's")
    elif options.draft_vocab_size not in (None, options.vocab_size):
        raise lacks(published, "DFlash", f"draft_vocab_size {options.draft_vocab_size}", "the whole vocabulary")
    config = kind.Config(
        **layer_fields(published, options, "DFlash"), draft_vocab_size=len(ids), qk_norm=True,
        states=states, own_lm_head=owns, mask_token_id=options.mask_token_id, block_size=options.block_size,
        causal=options.causal or options.causal_head, **more,
    )  # fmt: skip
    return published.build(kind, config, ids)


def _is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this method, or of one that derives from it and is refused by name."""
    if KIND in config:
        return config[KIND] == "dflash"
    return "dflash_config" in config or any(_FAMILY.match(str(name)) for name in config.get("architectures") or ())


def _joined(published: Published) -> dict[str, Any]:
    """The config.json of the authors, without its nesting. Raises `IncompatibleModels` for another architecture."""
    config = published.config
    others = [f"architecture {name}" for name in config.get("architectures") or () if name != "DFlashDraftModel"]
    if others:
        raise lacks(published, "DFlash", ", ".join(others), _READ)
    outer = {key: value for key, value in config.items() if key != "dflash_config"}
    return joined(published.name, outer, config.get("dflash_config", {}), "dflash_config")


def _check_target(published: Published, options: DFlashOptions, target: TargetFacts) -> None:
    """Raise `ConfigError` for a head of another target."""
    message = f"the head at {str(published.folder)!r} is for another target"
    told = {"num_layers": options.num_target_layers, "hidden_size": options.target_hidden_size}
    ours = {"num_layers": target.num_layers, "hidden_size": target.hidden_size}
    said = {name: value or ours[name] for name, value in told.items()}
    check_sizes(message, said, ours, "name the one that it was trained for")


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
    c, kind = head.config, "a JetSpec head" if head.config.causal else "a DFlash head"
    refuse_if(c.causal and engine != "vllm", engine, kind, "export it for vllm")
    if engine == LLAMA_CPP:
        refuse_if(not c.qk_norm, engine, f"{kind} without norms of queries and keys")
        more = {"block_size": c.block_size, MASK: c.mask_token_id}
        return file_layout("dflash", head, facts, _OWN, more, c.num_speculative_tokens)
    is_theirs, fix = engine == SPECULATORS, "export it for llama.cpp or speculators"
    refuse_if(c.own_lm_head and not is_theirs, engine, f"{kind} with output rows of its own", fix)
    is_qwen3 = c.qk_norm and not c.attention_bias
    refuse_if(not is_qwen3, engine, f"{kind} whose layers are not Qwen3's", "train it with head.qk_norm=true")
    refuse_if(min(c.states) == 0, engine, f"{kind} that reads the embeddings", "train one that reads later states")
    refuse_if(max(c.states) >= facts.num_layers, engine, f"state {max(c.states)}, behind the final norm here")
    layers = {
        "model_type": "qwen3",
        **layers_config(c, facts),
        "attention_bias": c.attention_bias,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
    }
    notes = [f"{engine} drafts a chain of the most probable tokens, not a tree."]
    if c.draft_vocab_size < c.vocab_size and not is_theirs:
        notes.append(
            f"{engine} knows no draft vocabulary of DFlash heads: it drafts over all {c.vocab_size} tokens with the "
            f"target's output rows, where Paceline drafts over {c.draft_vocab_size}."
        )
    if c.window is not None:
        notes.append(f"{engine} reads all states of a text, where Paceline reads the last {c.window}.")
    if is_theirs:
        return _speculators(head, layers, facts, tuple(notes))
    config = {
        "architectures": ["DFlashDraftModel"],
        **layers,
        "block_size": c.block_size,
        "num_target_layers": facts.num_layers,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": [state - 1 for state in c.states]},
    }
    if c.causal:
        config["dflash_config"]["causal"] = True
    serve = vllm_command("dflash", c.num_speculative_tokens)
    if engine == "sglang":
        serve = "python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        serve += "--speculative-draft-model-path {folder}"
    return Layout(config, stored_weights(head), serve, tuple(notes))


def _speculators(head: DFlashHead, layers: dict[str, Any], facts: TargetFacts, notes: tuple[str, ...]) -> Layout:
    c, tensors, ids = head.config, stored_weights(head), head.draft_ids.cpu()
    if not c.own_lm_head:
        tensors["lm_head.weight"] = target_rows(SPECULATORS, facts, ids)
    if len(ids) < c.vocab_size:
        tensors |= draft_tables(ids, c.vocab_size)
    options = {
        "block_size": c.block_size,
        "draft_vocab_size": c.draft_vocab_size,
        "mask_token_id": c.mask_token_id,
        "aux_hidden_state_layer_ids": list(c.states),
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
    }
    config = nested("dflash", "DFlashDraftModel", layers, options, facts, c.num_speculative_tokens)
    return Layout(config, tensors, "vllm serve {folder}", notes)
