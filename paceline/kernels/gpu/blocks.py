"""Weights in the block formats of files for the kernels of a GPU: the twin of `packing.Blocks`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..library import BlockFormat
from .rows import embed
from .structures import Matrix

BLOCKS = frozenset(BlockFormat) - {BlockFormat[name] for name in ("Q2_K", "Q3_K", "IQ4_XS", "INT2", "INT3")}
"""The block formats that these kernels read."""
_PIECE = 1 << 26  # bytes, about, that are taken apart at once


def nibbles(codes: Tensor) -> Tensor:
    """Codes of four bits, uint8 [out, in], as `formats` lays them out; padded with zeros to 64 inputs."""
    codes = nn.functional.pad(codes, (0, -codes.shape[1] % 64)).view(len(codes), -1, 2, 32)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)


def _words(halves: Tensor) -> Tensor:
    """Bytes [out, blocks, 2 or a multiple of 4] as int32 [out, words]."""
    flat = halves.flatten(1)
    return nn.functional.pad(flat, (0, -flat.shape[1] % 4)).view(torch.int32)


def _taken_apart(form: BlockFormat, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Data and scales, see `formats`, and the floats among them, from blocks as in a file, uint8 [out, blocks, bytes]."""
    if form in (BlockFormat.Q4_K, BlockFormat.Q5_K):
        head, fifth, codes = blocks.split([16, 32 if form is BlockFormat.Q5_K else 0, 128], -1)
        return torch.cat([codes, fifth], -1).flatten(1), _words(head), head[..., :4].contiguous().view(torch.float16)
    if form is BlockFormat.Q6_K:
        codes, scales, d = blocks.split([192, 16, 2], -1)
        words = _words(nn.functional.pad(torch.cat([scales, d], -1), (0, 2)))
        return codes.flatten(1), words, d.contiguous().view(torch.float16)
    size = {BlockFormat.MXFP4: 1}.get(form, 4 if form.has_mins else 2)
    head, fifth, codes = blocks.split([size, 4 if form.bits == 5 else 0, 32 if form.bits == 8 else 16], -1)
    if form is BlockFormat.MXFP4:  # exponents, as bfloat16
        head = torch.where(head == 0, 64, head.short() << 7).view(torch.uint8)
    floats = head.contiguous().view(torch.bfloat16 if form is BlockFormat.MXFP4 else torch.float16)
    if form.bits == 5:
        head = torch.cat([nn.functional.pad(head, (0, 4 - size)), fifth], -1)
    data = codes.flatten(1) if form.bits == 8 else nibbles(torch.cat([codes & 15, codes >> 4], -1).flatten(1))
    return data, _words(head), floats


@dataclass(eq=False)
class Blocks:
    """Weights in a block format.

    shape: [out, in]. data, scales: see `formats`. is_finite: whether all scales are, where they were read.
    """

    form: BlockFormat
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor
    is_finite: bool = True

    @classmethod
    def of(
        cls, form: BlockFormat, shape: tuple[int, int], read: Callable[[slice], Tensor], device: torch.device
    ) -> "Blocks":
        """From the bytes of blocks, as a file holds them.

        read: gives those of some outputs, uint8 [out, bytes of a row].
        """
        outs, ins = shape
        step, parts, finite = max(1, _PIECE // ins), list[tuple[Tensor, Tensor]](), True
        for first in range(0, outs, step):
            raw = read(slice(first, min(first + step, outs))).to(device)
            data, scales, floats = _taken_apart(form, raw.view(len(raw), ins // form.inputs, -1))
            parts.append((data, scales))
            finite &= bool(floats.isfinite().all())
        data, scales = (torch.cat(some) for some in zip(*parts, strict=True))
        return cls(form, shape, data.view(torch.int8) if form is BlockFormat.Q8_0 else data, scales, finite)

    @property
    def matrix(self) -> Matrix:
        """The weights for products, and as a table of embeddings."""
        return Matrix(self.data, self.scales, outs=self.shape[0], ins=self.shape[1], format=int(self.form))

    def rows(self, indices: Sequence[int]) -> Tensor:
        """The weights of some outputs, float32 [R, in]."""
        ids = torch.tensor(indices, dtype=torch.int32, device=self.data.device)
        out = torch.empty(len(ids), self.shape[1], device=ids.device)
        embed(self.matrix, ids, out, 1.0)
        return out

    def values(self, places: Sequence[int]) -> Tensor:
        """The weights at these places of the flattened matrix, float32."""
        rows, columns = zip(*(divmod(place, self.shape[1]) for place in places), strict=True)
        return self.rows(rows).gather(1, torch.tensor(columns, device=self.data.device)[:, None])[:, 0]
