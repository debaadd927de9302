"""Layers over weights in block formats, for the kernels of their device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..kernels.packing import Blocks
from .packed import PackedMatrix, QuantizedLinear, product

Activations: TypeAlias = Literal["int8", "int16"]
"""What inputs are rounded to before they are multiplied with blocks."""


class BlockWeights(nn.Module):
    """Weights [rows, columns] in blocks; `dtype` is what they are read as."""

    def _hold(self, blocks: Any, dtype: torch.dtype) -> None:
        self.form, self.shape, self.dtype, self._kind = blocks.form, blocks.shape, dtype, type(blocks)
        self.data = nn.Buffer(blocks.data, persistent=False)
        if not isinstance(blocks, Blocks):
            self.scales = nn.Buffer(blocks.scales, persistent=False)

    @property
    def blocks(self) -> Any:
        """The packed weights: `packing.Blocks`, or those of the kernels of a GPU."""
        if self._kind is Blocks:
            return Blocks(self.form, self.shape, self.data)
        return self._kind(self.form, self.shape, self.data, self.scales)

    @property
    def weight(self) -> Tensor:
        """The weights, unpacked on every read."""
        return self.blocks.rows(range(self.shape[0])).to(self.dtype)

    def values(self, places: Sequence[int]) -> Tensor:
        """The weights at these places of the flattened matrix."""
        return self.blocks.values(places).to(self.dtype)


class BlockLinear(BlockWeights, QuantizedLinear):
    """A linear layer with weights in a block format.

    dtype: what `weight` is read as. input_bits: 8 or 16, of the integers that inputs are rounded to on a CPU.
    """

    def __init__(self, blocks: Any, bias: Tensor | None, dtype: torch.dtype, input_bits: int = 8):
        super().__init__()
        self._hold(blocks, dtype)
        (self.out_features, self.in_features), self.bias, self.input_bits = blocks.shape, bias, input_bits

    @property
    def matrix(self) -> Any:
        """The weights for the kernels of its device."""
        if self._kind is Blocks:
            return PackedMatrix(self.out_features, self.in_features, self.blocks, self.bias, self.input_bits)
        bias = None if self.bias is None else self.bias.detach().float()
        return replace(self.blocks.matrix, bias=bias)


class BlockEmbedding(BlockWeights):
    """Token embeddings in a block format, of which rows are unpacked as they are needed.

    dtype: of the rows. scale: what transformers multiplies them with.
    """

    def __init__(self, blocks: Any, dtype: torch.dtype, scale: float | None = None):
        super().__init__()
        self._hold(blocks, dtype)
        self.num_embeddings, self.embedding_dim = blocks.shape
        self.embed_scale = scale

    @property
    def table(self) -> Any:
        """The weights as the kernels of their device look up rows."""
        return self.data if self._kind is Blocks else self.blocks.matrix

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        rows = self.blocks.rows(token_ids.flatten().tolist()).to(self.dtype)
        rows = rows if self.embed_scale is None else rows * torch.tensor(self.embed_scale, dtype=self.dtype)
        return rows.view(*token_ids.shape, self.embedding_dim)


def check_products(model: nn.Module) -> None:
    """Raise `IncompatibleModels` if the kernels of this machine do not multiply as the weights say, in any format.

    The self-test could not tell: plain transformers multiplies by the same kernels.
    """
    layers = {layer.form: layer for layer in model.modules() if isinstance(layer, BlockLinear)}
    for form, layer in layers.items():
        outs, ins = min(layer.out_features, 32), layer.in_features
        part = replace(layer.matrix.part(0, outs), bias=None)
        weight = layer.blocks.rows(range(outs)).double()
        x = torch.randn(3, ins, generator=torch.Generator().manual_seed(0)).to(weight.device)
        want = x.double() @ weight.T
        for input_bits, most in ((8, 0.03), (16, 1e-4)):
            got = product(replace(part, input_bits=input_bits), x)
            error = float((got - want).norm() / (x.double().norm() * weight.norm() / ins**0.5).clamp(min=1e-30))
            if not error <= most:
                raise IncompatibleModels(
                    f"the kernels for {form.name} multiply wrongly on this machine", got=f"an error of {error:.1e}",
                    expected=f"at most {most}", fix="set PACELINE_ISA=portable, or use another device, and report it",
                )  # fmt: skip
