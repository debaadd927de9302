"""Weights in the block formats of files for the kernels of a GPU: the twin of `packing.Blocks`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..library import BlockFormat
from ..packing import nibbles
from .rows import embed
from .structures import Matrix

_PIECE = 1 << 26  # bytes, about, that are taken apart at once


def _words(halves: Tensor) -> Tensor:
    """Bytes [out, blocks, 2 or a multiple of 4] as int32 [out, words]."""
    flat = halves.flatten(1)
    return nn.functional.pad(flat, (0, -flat.shape[1] % 4)).view(torch.int32)


def taken_apart(form: BlockFormat, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales, and the floats among these, see `formats`. blocks: as in a file, uint8 [out, blocks, bytes]."""
    if form in (BlockFormat.Q4_K, BlockFormat.Q5_K):
        head, fifth, codes = blocks.split([16, 32 if form is BlockFormat.Q5_K else 0, 128], -1)
        return torch.cat([codes, fifth], -1).flatten(1), _words(head), head[..., :4].contiguous().view(torch.float16)
    if form is BlockFormat.IQ4_XS:
        head, codes = blocks.split([8, 128], -1)
        codes = codes.reshape(len(codes), -1, 16)
        return _nibbles(codes), _words(head), head[..., :2].contiguous().view(torch.float16)
    if form.inputs == 256:
        if form is BlockFormat.Q2_K:
            blocks = blocks.roll(-16, -1)  # scales come first there
            codes, d, scales = blocks.split([64, 4, 16], -1)
            high = codes[..., :0]
        else:
            sizes = [32, 64, 12, 2] if form is BlockFormat.Q3_K else [0, 192, 16, 2]
            high, codes, scales, d = blocks.split(sizes, -1)
        words = _words(nn.functional.pad(torch.cat([scales, d], -1), (0, 4 - d.shape[-1])))
        return torch.cat([codes, high], -1).flatten(1), words, d.contiguous().view(torch.float16)
    size = {BlockFormat.MXFP4: 1}.get(form, 4 if form.has_mins else 2)
    head, fifth, codes = blocks.split([size, 4 if form.bits == 5 else 0, 32 if form.bits == 8 else 16], -1)
    if form is BlockFormat.MXFP4:  # exponents, as bfloat16
        head = torch.where(head == 0, 64, head.short() << 7).view(torch.uint8)
    floats = head.contiguous().view(torch.bfloat16 if form is BlockFormat.MXFP4 else torch.float16)
    if form.bits == 5:
        head = torch.cat([nn.functional.pad(head, (0, 4 - size)), fifth], -1)
    data = codes.flatten(1).view(torch.int8) if form.bits == 8 else _nibbles(codes)
    return data, _words(head), floats


def _nibbles(halves: Tensor) -> Tensor:
    """From bytes [out, blocks, 16], of which each has two of 32 inputs."""
    return nibbles(torch.cat([halves & 15, halves >> 4], -1).flatten(1))


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
            data, scales, floats = taken_apart(form, raw.view(len(raw), ins // form.inputs, -1))
            parts.append((data, scales))
            finite &= bool(floats.isfinite().all())
        data, scales = (torch.cat(some) for some in zip(*parts, strict=True))
        return cls(form, shape, data, scales, finite)

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
