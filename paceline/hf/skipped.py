"""Sub-layers that a self-draft leaves out: the attention or the MLP of a layer, which then adds nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

ATTENTION, MLP = ("self_attn", "attention", "attn"), ("mlp", "feed_forward", "block_sparse_moe")


class Skipped(nn.Module):
    """In the place of a sub-layer. base: that one; its keys keep their place in the cache, and are not written.

    is_attention: whether it is an attention layer, which also returns weights.
    """

    def __init__(self, base: nn.Module, is_attention: bool):
        super().__init__()
        self.base, self.is_attention = base, is_attention

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        """Zeros in the shape of the hidden states."""
        nothing = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return (nothing, None) if self.is_attention else nothing


def sublayers(layers: Sequence[nn.Module]) -> list[tuple[str, str]]:
    """The names of attention and MLP in each layer. Raises `ConfigError` for layers of anything else beside norms."""
    return [_names(layer, index) for index, layer in enumerate(layers)]


def _names(layer: nn.Module, index: int) -> tuple[str, str]:
    parts = [name for name, part in layer.named_children() if "norm" not in name and any(True for _ in _tensors(part))]
    parts += [name for name, _ in layer.named_parameters(recurse=False)]
    attention, mlp = (next((name for name in names if name in parts), "") for names in (ATTENTION, MLP))
    if sorted(parts) != sorted((attention, mlp)) or getattr(layer.get_submodule(attention), "is_kv_shared_layer", False):
        raise ConfigError(
            "self-skip drafts with layers of one attention and one MLP", got=f"layer {index} has {', '.join(parts)}",
            expected="attention with keys of its own, an MLP or experts, and norms", fix="self-int4 drafts with any layers",
        )  # fmt: skip
    return attention, mlp


def _tensors(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(), *part.buffers()]
