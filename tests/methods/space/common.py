"""Tiny SPACE adapters with factors that matter, and trees with mask tokens."""

from collections.abc import Sequence

import torch
from torch import nn

from paceline.core.tree import TokenTree
from paceline.methods.space.adapter import SpaceAdapter, SpaceConfig
from tests.helpers import VOCAB
from tests.tiny import tiny_model

LLAMA = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))
NEOX = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
LINEARS = {"gpt_neox": NEOX}
"""Every linear of a decoder layer, by tiny architecture; `LLAMA` where it is not named."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of a model as transformers made it."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def adapter(
    name: str = "llama",
    num_masks: int = 3,
    rank: int = 4,
    linears: tuple[str, ...] | None = None,
    shared_mask: bool = False,
    transition_rank: int = 0,
    seed: int = 0,
    strength: float = 0.5,
    **overrides: object,
) -> SpaceAdapter:
    """A random adapter to `tiny_model(name, **overrides)`; every factor moves the logits clearly, unlike a fresh one's.

    rank 0: mask embeddings only.
    """
    model = tiny_model(name, **overrides)
    layers = decoder_layers(model)
    names = (linears or LINEARS.get(name, LLAMA)) if rank else ()
    shapes = tuple(tuple(layers[0].get_submodule(one).weight.shape) for one in names)
    torch.manual_seed(seed)
    config = SpaceConfig(
        model.config.hidden_size, len(layers), VOCAB, num_masks, shared_mask, rank, names, shapes, transition_rank
    )
    made = SpaceAdapter(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=strength)
    return made.eval().requires_grad_(False)


def hung(
    tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], masks: Sequence[int], vocab_size: int = VOCAB
) -> TokenTree:
    """Candidates' trees, one list per row (root first), with `masks[row]` mask tokens below every node of the row.

    root, candidates, masks of the root, masks of candidate 1, ... The rows are padded to the longest.
    """
    ids, ups, flags = [], [], []
    for row, above, count in zip(tokens, parents, masks, strict=True):
        own, up = list(row), list(above)
        for node in range(len(row)):
            for mask in range(count):
                up.append(len(own) - 1 if mask else node)
                own.append(vocab_size + mask)
        ids.append(own)
        ups.append(up)
        flags.append([False] * len(row) + [True] * (len(own) - len(row)))
    return TokenTree.from_lists(ids, ups, probes=flags)


def hung_chain(tokens: Sequence[Sequence[int]], masks: Sequence[int]) -> TokenTree:
    """`hung` for chains of candidates."""
    return hung(tokens, [list(range(-1, len(row) - 1)) for row in tokens], masks)
