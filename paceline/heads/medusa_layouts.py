"""Medusa heads as others publish them, read and written: the original repository's layout and vLLM's.

original      {head}.{block}.linear.weight (.bias), {head}.{blocks}.weight
vLLM          blocks.{head}.layers.{block}.weight (.bias), lm_heads.{head}.weight, or lm_head.weight for all heads,
              token_map: the target's ids of the output rows.  These are also our names; we write this layout,
              without token_map.
"""

import re
from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError, IncompatibleModels
from ..schema import validate
from .parallel import MedusaConfig, MedusaHead
from .parts import Vocabulary
from .published import Layout, Published, TargetFacts, is_copy, refuse_if, stored_weights, target_rows, vllm_command

NAMES = re.compile(r"(medusa_heads\.|medusa_head\.)?\d+\.\d+\.|blocks\.\d+\.|lm_heads\.\d+\.")
"""Of tensors that only Medusa heads have."""
_RESIDUAL = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def read_medusa(published: Published, target: TargetFacts) -> MedusaHead:
    """Heads over the target's last state. Their number is that of the file: published configs are often wrong."""
    published.tensors = {_new_name(name): tensor for name, tensor in published.tensors.items()}
    tensors = published.tensors
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        raise ConfigError(f"no Medusa heads at {str(published.folder)!r}", got=", ".join(sorted(tensors)[:8]))
    heads, layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    vocab_size = target.vocab_size
    if (given := published.config.get("vocab_size")) is not None:
        vocab_size = validate(cast("type[int]", Vocabulary), given, "vocab_size of the head")
    if published.config.get("logit_scale", 1.0) not in (None, 1.0):
        raise IncompatibleModels("Medusa heads with a logit_scale", expected="logits as they are")
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
    _unshare_output(published, heads, rows)
    config = MedusaConfig(
        hidden_size=int(tensors[blocks[0][0]].shape[0]),
        num_heads=heads,
        states=(target.num_layers,),
        draft_vocab_size=len(draft_ids),
        vocab_size=vocab_size,
        num_layers=layers,
        bias=any(match[3] == "bias" for match in blocks),
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


def _unshare_output(published: Published, heads: int, rows: Tensor | None) -> None:
    """One output layer for all heads is dropped where it has the target's `rows`; else each head gets it."""
    tensors = published.tensors
    shared = tensors.pop("lm_head.weight", None)
    if shared is None and published.config.get("original_lm_head"):
        shared = tensors.pop("lm_heads.0.weight", None)
    if shared is not None and not is_copy(shared, rows):
        tensors.update({f"lm_heads.{head}.weight": shared for head in range(heads)})


def medusa_layout(head: MedusaHead, engine: str, facts: TargetFacts) -> Layout:
    """Medusa heads as vLLM reads them. Raises `NotExportable` for other engines and for features it lacks.

    vLLM 0.32 refuses files with a token_map ("weights were not initialized"). Heads over some of the target's output
    rows are written with all of them.
    """
    c = head.config
    refuse_if(engine != "vllm", engine, "Medusa heads", "export them for vllm")
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
