"""Layers over the quantised weights of llama.cpp's files, as they are: nothing is rounded again."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.library import BlockFormat
from ..kernels.packing import Blocks, unpack
from .packed import PackedMatrix, QuantizedLinear


class BlockWeights(nn.Module):
    """Weights [rows, columns] in blocks; `dtype` is what they are read as."""

    def _hold(self, blocks: Blocks, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.form, self.shape, self.dtype = blocks.form, torch.Size(shape), dtype
        self.data = nn.Buffer(blocks.data, persistent=False)

    @property
    def blocks(self) -> Blocks:
        """The packed weights."""
        return Blocks(self.form, self.data)

    @property
    def weight(self) -> Tensor:
        """The weights, unpacked on every read."""
        return unpack(self.blocks, *self.shape).to(self.dtype)

    def values(self, places: Sequence[int]) -> Tensor:
        """The weights at these places of the flattened matrix."""
        columns = self.shape[1]
        rows = self.blocks.rows([place // columns for place in places], columns)
        return rows[torch.arange(len(places)), torch.tensor([place % columns for place in places])].to(self.dtype)


class BlockLinear(QuantizedLinear, BlockWeights):
    """A linear layer on CPU with weights in a block format. Its inputs are rounded to 8 bits.

    dtype: what `weight` is read as.
    """

    def __init__(self, blocks: Blocks, outs: int, ins: int, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self._hold(blocks, (outs, ins), dtype)
        self.out_features, self.in_features, self.bias = outs, ins, bias

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.out_features, self.in_features, self.blocks, self.bias)


class BlockEmbedding(BlockWeights):
    """Token embeddings in a block format, of which rows are unpacked as they are needed.

    dtype: of the rows. scale: what transformers multiplies them with.
    """

    def __init__(self, blocks: Blocks, count: int, width: int, dtype: torch.dtype, scale: Tensor | None):
        super().__init__()
        self._hold(blocks, (count, width), dtype)
        self.num_embeddings, self.embedding_dim = count, width
        self.embed_scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        rows = self.blocks.rows(token_ids.flatten().tolist(), self.embedding_dim).to(self.dtype)
        rows = rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)
        return rows.view(*token_ids.shape, self.embedding_dim)


def block_format(name: str) -> BlockFormat | None:
    """The format of this name in llama.cpp, for example Q4_K; None if there are no kernels for it."""
    return BlockFormat.__members__.get(name)
