"""Medusa heads as others publish them, read and written: the original repository's layout and vLLM's.

original      {head}.{block}.linear.weight (.bias), {head}.{blocks}.weight
vLLM          blocks.{head}.layers.{block}.weight (.bias), lm_heads.{head}.weight, or lm_head.weight for all heads,
              token_map: the target's ids of the output rows.  These are also our names; we write this layout,
              without token_map.
"""

import re
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import ConfigError
from ...schema import checked
from ..heads.parts import Vocabulary, Width
from ..heads.published import (
    Layout,
    Published,
    TargetFacts,
    is_copy,
    refuse_if,
    renamed,
    stored_weights,
    target_rows,
    vllm_command,
)
from ..heads.published_options import PublishedLayers, check_held, said
from .head import MedusaConfig, MedusaHead

_NAMES = re.compile(r"(medusa_heads\.|medusa_head\.)?\d+\.\d+\.|blocks\.\d+\.|lm_heads\.\d+\.")
"""Of tensors that only Medusa heads have."""
_RESIDUAL = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


@checked
class _Medusa:
    """What config.json of Medusa heads says, beside what their tensors say better."""

    vocab_size: Vocabulary | None = None
    hidden_size: Width | None = None
    original_lm_head: bool = False
    medusa_fc_bias: bool | None = None


_OF_TARGET = {field.name for field in fields(cast("Any", PublishedLayers))} | {
    "num_heads", "medusa_num_heads", "medusa_num_layers", "truncated_vocab_size", "max_paths", "topk", "version",
}  # fmt: skip
"""Keys that say nothing of the heads: about the layers of the target, about trees, and counts that are often wrong."""


def read(published: Published, target: TargetFacts, engine: str | None) -> MedusaHead | None:
    """Heads over the target's last state; None for files of another method.

    Their number is that of the file: published configs are often wrong.
    """
    if published.config.get("model_type") != "medusa" and not any(_NAMES.match(name) for name in published.tensors):
        return None
    published.tensors = renamed(published.tensors, _new_name, published.folder)
    tensors, options = published.tensors, said(published, _Medusa, "Medusa", "residual blocks of silu", _OF_TARGET)
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        raise ConfigError(f"no Medusa heads at {str(published.folder)!r}", got=", ".join(sorted(tensors)[:8]))
    heads, layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    vocab_size, width = options.vocab_size or target.vocab_size, int(tensors[blocks[0][0]].shape[0])
    bias = any(match[3] == "bias" for match in blocks)
    sizes = {"hidden_size": (options.hidden_size, width), "medusa_fc_bias": (options.medusa_fc_bias, bias)}
    check_held(published, sizes)
    draft_ids = torch.arange(vocab_size)
    token_map = tensors.pop("token_map", None)
    if token_map is not None:
        draft_ids = token_map.long()
        if len(draft_ids.unique()) != len(draft_ids) or not bool(((draft_ids >= 0) & (draft_ids < vocab_size)).all()):
            raise ConfigError(
                f"the token_map of {str(published.folder)!r} is not sound",
                got=f"{len(draft_ids)} ids, {len(draft_ids.unique())} different, up to {int(draft_ids.max())}",
                expected=f"different ids below {vocab_size}",
            )
        for name in [name for name in tensors if name.startswith(("lm_heads.", "lm_head."))]:
            if len(tensors[name]) > len(draft_ids):  # rows of tokens outside the map
                tensors[name] = tensors[name][draft_ids]
    rows = target.lm_head
    if rows is not None and token_map is not None:
        rows = rows[draft_ids.to(rows.device)]
    _unshare_output(published, heads, rows, options.original_lm_head)
    config = MedusaConfig(
        hidden_size=width,
        num_heads=heads,
        states=(target.num_layers,),
        draft_vocab_size=len(draft_ids),
        vocab_size=vocab_size,
        num_layers=layers,
        bias=bias,
        own_lm_head=any(name.startswith("lm_heads.") for name in tensors),
    )
    return published.build(MedusaHead, config, draft_ids)


def _new_name(name: str) -> str:
    name = re.sub(r"^medusa_heads?\.", "", name)
    if match := _RESIDUAL.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := _OUTPUT.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _unshare_output(published: Published, heads: int, rows: Tensor | None, first: bool) -> None:
    """One output layer for all heads is dropped where it has the target's `rows`; else each head gets it.

    first: it may be that of the first head, which then stands for all.
    """
    tensors = published.tensors
    shared = tensors.pop("lm_head.weight", None)
    if shared is None and first:
        shared = tensors.pop("lm_heads.0.weight", None)
    if shared is not None and not is_copy(shared, rows):
        tensors.update({f"lm_heads.{head}.weight": shared for head in range(heads)})


def layout(head: MedusaHead, engine: str, facts: TargetFacts, num_tokens: int) -> Layout:
    """Medusa heads as vLLM reads them. Raises `NotExportable` for features that it lacks.

    vLLM 0.32 refuses files with a token_map ("weights were not initialized"). Heads over some of the target's output
    rows are written with all of them.
    """
    c = head.config
    refuse_if(c.states != (facts.num_layers,), engine, f"Medusa heads that read states {c.states}, not the last one")
    notes, part = ["vLLM drafts a chain of each head's most probable token, not a tree."], c.draft_vocab_size
    if part < c.vocab_size:
        refuse_if(c.own_lm_head, engine, "Medusa heads with output layers for a part of the vocabulary")
        notes.append(f"It drafts any token there, here only the {part:,} of the draft vocabulary.")
    tensors = stored_weights(head)
    if not c.own_lm_head:
        tensors["lm_head.weight"] = target_rows(engine, facts, torch.arange(c.vocab_size))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "num_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "truncated_vocab_size": c.vocab_size,
        "original_lm_head": not c.own_lm_head,
        "medusa_fc_bias": c.bias,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": str(tensors["blocks.0.layers.0.weight"].dtype).removeprefix("torch."),
    }
    return Layout(config, tensors, vllm_command("medusa", c.num_heads), tuple(notes))
