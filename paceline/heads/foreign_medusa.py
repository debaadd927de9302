"""Medusa heads as published: by the original repository, by its followers in safetensors, and as vLLM stores them.

original      {head}.{block}.linear.weight (.bias), {head}.{blocks}.weight
vLLM          blocks.{head}.layers.{block}.weight (.bias), lm_heads.{head}.weight, or lm_head.weight for all heads,
              token_map: the target's ids that the output rows stand for
"""

import re
from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError, IncompatibleModels
from ..modules.heads import MedusaConfig, MedusaHead
from ..modules.sizes import Vocabulary
from ..schema import validate
from .foreign_files import Published, Target, dtype_of, is_copy

_RESIDUAL = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def read_medusa(published: Published, target: Target | None) -> MedusaHead:
    """Heads over the target's last state. Their number is that of the file: published configs are often wrong."""
    if target is None:
        raise ConfigError(
            f"the head at {str(published.folder)!r} cannot be read without its target",
            got="it reads the target's last state",
            fix="name the target",
        )
    published.tensors = {_new_name(name): tensor for name, tensor in published.tensors.items()}
    tensors = published.tensors
    blocks = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        raise ConfigError(f"no Medusa heads at {str(published.folder)!r}", got=", ".join(sorted(tensors)[:8]))
    heads, layers = (1 + max(int(match[group]) for match in blocks) for group in (1, 2))
    hidden = int(tensors[blocks[0][0]].shape[0])
    told = published.config.get("vocab_size")
    vocab_size = (
        target.vocab_size if told is None else validate(cast("type[int]", Vocabulary), told, "vocab_size of the head")
    )
    token_map = tensors.pop("token_map", None)
    draft_ids = torch.arange(vocab_size) if token_map is None else _checked(published, token_map.long(), vocab_size)
    if published.config.get("logit_scale", 1.0) not in (None, 1.0):
        raise IncompatibleModels("Medusa heads with a logit_scale", expected="logits as they are")
    _select_rows(published, token_map, heads, target)
    ascending = torch.argsort(draft_ids)
    config = MedusaConfig(
        hidden_size=hidden,
        num_heads=heads,
        states=(target.num_layers,),
        draft_vocab_size=len(draft_ids),
        vocab_size=vocab_size,
        num_layers=layers,
        bias=any(match[3] == "bias" for match in blocks),
        own_lm_head=any(name.startswith("lm_heads.") for name in tensors),
    )
    with torch.device("meta"):  # shapes only
        shapes = MedusaHead(config).state_dict()
    del shapes["draft_ids"]
    state = {name: published.take(name, tuple(shapes[name].shape)) for name in shapes}
    published.finish()
    state = {name: one[ascending] if name.startswith("lm_heads.") else one for name, one in state.items()}
    state["draft_ids"] = draft_ids[ascending]
    module = MedusaHead(config, draft_ids[ascending])
    module.load_state_dict(state)
    return module.to(dtype_of(state.values()))


def _new_name(name: str) -> str:
    name = re.sub(r"^medusa_heads?\.", "", name)
    if match := _RESIDUAL.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := _OUTPUT.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _select_rows(published: Published, token_map: Tensor | None, heads: int, target: Target) -> None:
    """One output layer for all heads becomes the target's or one for each; rows of tokens outside the map go."""
    tensors = published.tensors
    for name in [name for name in tensors if name.startswith(("lm_heads.", "lm_head."))]:
        if token_map is not None and len(tensors[name]) > len(token_map):
            tensors[name] = tensors[name][token_map.long()]
    shared = tensors.pop("lm_head.weight", None)
    if shared is None and published.config.get("original_lm_head"):
        shared = tensors.pop("lm_heads.0.weight", None)
    if shared is None:
        return
    if target.lm_head is not None:
        rows = target.lm_head if token_map is None else target.lm_head[token_map.long().to(target.lm_head.device)]
        if shared.shape == rows.shape and is_copy(shared, rows):
            return
    tensors.update({f"lm_heads.{head}.weight": shared for head in range(heads)})


def _checked(published: Published, ids: Tensor, vocab_size: int) -> Tensor:
    if len(ids.unique()) != len(ids) or not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ConfigError(
            f"the token_map of {str(published.folder)!r} is not sound",
            got=f"{len(ids)} ids, {len(ids.unique())} different, up to {int(ids.max())}",
            expected=f"different ids below {vocab_size}",
        )
    return ids
