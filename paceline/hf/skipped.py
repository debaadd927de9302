"""What a self-draft leaves out: attention and MLPs of layers, which then add nothing, and rows of the output layer."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..errors import ConfigError
from ..quant.packed import device_of

ATTENTION, MLP = ("self_attn", "attention", "attn"), ("mlp", "feed_forward", "block_sparse_moe")


class Skipped(nn.Module):
    """In the place of a sub-layer. base: that one; its keys keep their place in the cache, and are not written.

    is_attention: whether it is an attention layer, which also returns weights. Some experts also return scores.
    """

    def __init__(self, base: nn.Module, is_attention: bool):
        super().__init__()
        self.base, self.is_attention = base, is_attention
        self._num_beside = 1 if is_attention else None

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Zeros in the shape of the hidden states."""
        if self._num_beside is None:
            made = self.base(*args, **kwargs)
            self._num_beside = len(made) - 1 if isinstance(made, tuple) else 0
        nothing = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return (nothing, *[None] * self._num_beside) if self._num_beside else nothing


class FirstRows(nn.Module):
    """An output layer that knows the first tokens alone. whole: the one of all tokens."""

    bias = None

    def __init__(self, whole: Any, count: int):
        super().__init__()
        self.whole, self.out_features, self.in_features = whole, count, whole.in_features

    @property
    def matrix(self) -> Any:
        """The weights for native kernels."""
        found: Any = kernels.kernels_for(device_of(self.whole))
        return found.matrix_of(self.whole).part(0, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., count]."""
        return self.whole(x)[..., : self.out_features]


def sublayers(layers: Sequence[nn.Module]) -> list[tuple[str, str]]:
    """The names of attention and MLP in each layer. Raises `ConfigError` for layers of anything else beside norms."""
    return [_names(layer, index) for index, layer in enumerate(layers)]


def _names(layer: nn.Module, index: int) -> tuple[str, str]:
    parts = [name for name, part in layer.named_children() if "norm" not in name and _has_weights(part)]
    parts += [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
    attention, mlp = (next((name for name in names if name in parts), "") for names in (ATTENTION, MLP))
    if sorted(parts) != sorted((attention, mlp)):
        raise ConfigError(
            "self-skip drafts with layers of one attention and one MLP", got=f"layer {index} has {', '.join(parts)}",
            expected="attention, an MLP or experts, and norms", fix="self-int4 drafts with any layers",
        )  # fmt: skip
    return attention, mlp


def _has_weights(part: nn.Module) -> bool:
    return any(True for _ in chain(part.parameters(), part.buffers()))
