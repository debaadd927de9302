"""Layers over the quantised weights of llama.cpp's files, as they are: nothing is rounded again."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels.packing import Blocks, unpack
from .packed import PackedMatrix, QuantizedLinear


class BlockWeights(nn.Module):
    """Weights [rows, columns] in blocks; `dtype` is what they are read as."""

    def _hold(self, blocks: Blocks, dtype: torch.dtype) -> None:
        self.form, self.shape, self.dtype = blocks.form, blocks.shape, dtype
        self.data = nn.Buffer(blocks.data, persistent=False)

    @property
    def blocks(self) -> Blocks:
        """The packed weights."""
        return Blocks(self.form, self.shape, self.data)

    @property
    def weight(self) -> Tensor:
        """The weights, unpacked on every read."""
        return unpack(self.blocks, *self.shape).to(self.dtype)

    def values(self, places: Sequence[int]) -> Tensor:
        """The weights at these places of the flattened matrix."""
        columns = self.shape[1]
        rows = self.blocks.rows([place // columns for place in places])
        return rows[torch.arange(len(places)), torch.tensor([place % columns for place in places])].to(self.dtype)


class BlockLinear(QuantizedLinear, BlockWeights):
    """A linear layer on CPU with weights in a block format. Its inputs are rounded to 8 bits.

    dtype: what `weight` is read as.
    """

    def __init__(self, blocks: Blocks, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self._hold(blocks, dtype)
        (self.out_features, self.in_features), self.bias = blocks.shape, bias

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.out_features, self.in_features, self.blocks, self.bias)


class BlockEmbedding(BlockWeights):
    """Token embeddings in a block format, of which rows are unpacked as they are needed.

    dtype: of the rows. scale: what transformers multiplies them with.
    """

    def __init__(self, blocks: Blocks, dtype: torch.dtype, scale: float | None = None):
        super().__init__()
        self._hold(blocks, dtype)
        self.num_embeddings, self.embedding_dim = blocks.shape
        self.embed_scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        rows = self.blocks.rows(token_ids.flatten().tolist()).to(self.dtype)
        rows = rows if self.embed_scale is None else rows * torch.tensor(self.embed_scale, dtype=self.dtype)
        return rows.view(*token_ids.shape, self.embedding_dim)
