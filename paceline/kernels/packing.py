"""The layout of weights [out, in] for the kernels: blocks of 32 outputs, so that one load reads many outputs.

format      tensor                                  a weight
BF16        [blocks, in / 2, 32, 2]                 itself; pairs of inputs are adjacent
F16, F32    [blocks, in, 32]                        itself
BF12        [blocks, in / 4, 192], uint8            a bfloat16 in twelve bits, without loss, see `bf12.h`
Q4_K, ...   [blocks, bytes], uint8                  of `BlockFormat`, see `block_formats.h`

Outputs are padded with zeros to whole blocks, inputs to a multiple of 2 (BF16) or 4 (BF12).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from .library import BlockFormat, pack_blocks, record_bytes, shorten, unpack_blocks, widen

OUTPUTS_PER_BLOCK = 32
_MOST_RARE = 1 / 256  # of the weights; with more of them, patches take too long


def pack(weight: Tensor) -> Tensor:
    """bfloat16, float16 or float32 [out, in]."""
    outs, ins = weight.shape
    padded = nn.functional.pad(weight, (0, ins % 2, 0, -outs % OUTPUTS_PER_BLOCK))
    pairs = padded.view(len(padded) // OUTPUTS_PER_BLOCK, OUTPUTS_PER_BLOCK, -1, 2)
    if weight.dtype is torch.bfloat16:
        return pairs.transpose(1, 2).contiguous()
    return pairs.flatten(2).transpose(1, 2).contiguous()


def unpack(packed: "Tensor | Bf12 | Blocks", outs: int, ins: int) -> Tensor:
    """What `pack` or `Bf12.of` was given, [out, in]; blocks as float32."""
    if isinstance(packed, Bf12):
        return widen(packed.table, packed.units, packed.patches, outs, ins)
    if isinstance(packed, Blocks):
        return unpack_blocks(packed.form, packed.data, torch.arange(outs), ins)
    packed = packed.transpose(1, 2)
    if packed.dim() == 4:
        packed = packed.flatten(2)
    return packed.reshape(-1, packed.shape[2])[:outs, :ins].contiguous()


def nibbles(codes: Tensor) -> Tensor:
    """Codes of four bits, uint8 [out, in], in pairs of 32 inputs, the first in the lower bits: `gpu.formats`."""
    codes = nn.functional.pad(codes, (0, -codes.shape[1] % 64)).view(len(codes), -1, 2, 32)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)


def codes_of(packed: Tensor, ins: int) -> Tensor:
    """What `nibbles` was given."""
    pairs = packed.view(len(packed), -1, 1, 32)
    return torch.cat([pairs & 15, pairs >> 4], 2).flatten(1)[:, :ins]


@dataclass(eq=False)
class Bf12:
    """bfloat16 weights of which half of the bits, the high bytes, take few values. No value is changed.

    units: uint8 [blocks, in / 4, 192].
    table: the sixteen most frequent high bytes, uint8 [16].
    patches: where those of each block begin [blocks + 1], and then all, int32: place in the block << 8 | high byte.
    """

    units: Tensor
    table: Tensor
    patches: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Bf12 | None":
        """From bfloat16 [out, in]; None if too many of its high bytes are rare."""
        outs, ins = weight.shape
        blocks, room = -(-outs // OUTPUTS_PER_BLOCK), int(outs * ins * _MOST_RARE)
        units = torch.empty(blocks, -(-ins // 4), 192, dtype=torch.uint8)
        table = torch.empty(16, dtype=torch.uint8)
        patches = torch.empty(blocks + 1 + room, dtype=torch.int32)
        num_patches = shorten(weight.contiguous(), table, units, patches, room)
        return None if num_patches < 0 else cls(units, table, patches[: blocks + 1 + num_patches].clone())

    def __getitem__(self, blocks: slice) -> "Bf12":
        """Some of the blocks; their units are shared."""
        begins = self.patches[blocks.start : blocks.stop + 1]
        patches = self.patches[len(self.units) + 1 :][int(begins[0]) : int(begins[-1])]
        return Bf12(self.units[blocks], self.table, torch.cat([begins - begins[0], patches]))


_COLUMN = 16  # outputs of a record
_PIECE = 1 << 20  # bytes, about, that are packed at once


@dataclass(eq=False)
class Blocks:
    """Weights in a block format.

    shape: [out, in]. data: records, uint8 [blocks, bytes]. is_finite: whether all scales are, where they were packed.
    """

    form: BlockFormat
    shape: tuple[int, int]
    data: Tensor
    is_finite: bool = True

    @classmethod
    def of(
        cls,
        form: BlockFormat,
        shape: tuple[int, int],
        read: Callable[[slice], Tensor],
        room: Callable[[tuple[int, ...], torch.dtype], Tensor] = lambda size, dtype: torch.empty(size, dtype=dtype),
    ) -> "Blocks":
        """From the bytes of blocks, as a file holds them, in threads.

        read: gives those of some outputs, uint8 [out, bytes of a row]. room: gives the memory, see `WeightArena`.
        """
        outs, ins = shape
        size = -(-outs // OUTPUTS_PER_BLOCK), 2 * (ins // form.inputs) * record_bytes(form)
        data = room(size, torch.uint8)
        columns = data.view(-1, data.shape[1] // 2)
        step = OUTPUTS_PER_BLOCK * -(-_PIECE // data.shape[1])

        def fill(first: int) -> bool:
            packed = columns[first // _COLUMN : (first + step) // _COLUMN]
            return pack_blocks(form, read(slice(first, min(first + step, outs))), ins, packed)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            # a thread takes longer to start than one piece to pack
            filled = map(fill, (0,)) if outs <= step else threads.map(fill, range(0, outs, step))
            return cls(form, shape, data, all([*filled]))

    @classmethod
    def of_codes(cls, form: BlockFormat, codes: Tensor, params: Tensor) -> "Blocks":
        """Q4_0, Q4_1, INT4, INT3 or INT2 from codes [out, in] and the floats of every group of 32 inputs or more.

        params: d, or d and e, in the 16-bit type of the format, [in / group, out, 1 or 2]; see `block_formats.h`.
        """
        outs, ins = codes.shape
        parts = params.transpose(0, 1).repeat_interleave(ins // 32 // len(params), 1).contiguous()
        low, high = codes.reshape(outs, -1, 2, 16).to(torch.uint8).unbind(2)
        blocks = torch.cat([parts.view(torch.uint8), low | high << 4], -1).flatten(1)
        return cls.of(form, (outs, ins), lambda some: blocks[some])

    def rows(self, indices: Sequence[int]) -> Tensor:
        """The weights of some outputs, float32 [R, in]."""
        return unpack_blocks(self.form, self.data, torch.tensor(indices, dtype=torch.long), self.shape[1])

    def values(self, places: Sequence[int]) -> Tensor:
        """The weights at these places of the flattened matrix, float32. Of each, one block is unpacked."""
        each, ins, at = self.form.inputs, self.shape[1], torch.tensor(places, dtype=torch.long)
        rows, columns = at // ins, at % ins
        # outputs of a matrix with one block in a row, as which the same records can be read
        outputs = (rows // _COLUMN * (ins // each) + columns // each) * _COLUMN + rows % _COLUMN
        blocks = unpack_blocks(self.form, self.data, outputs, each)
        return blocks[torch.arange(len(at)), columns % each]

    def part(self, first: int, last: int) -> "Blocks":
        """Outputs `first` .. `last` - 1, copied. Raises `IncompatibleModels` if the first is within a record."""
        if first % _COLUMN:
            raise IncompatibleModels(
                "a matrix of quantised weights cannot be taken apart here", got=f"output {first}",
                expected=f"a multiple of {_COLUMN}", fix="leave its weights in 16 bits",
            )  # fmt: skip
        columns = self.data.view(-1, self.data.shape[1] // 2)[first // _COLUMN : -(-last // _COLUMN)]
        padded = nn.functional.pad(columns, (0, 0, 0, len(columns) % 2))
        return Blocks(self.form, (last - first, self.shape[1]), padded.view(-1, self.data.shape[1]))

    def moved(self, order: Tensor) -> "Blocks | None":
        """These outputs in this order, copied; None if it takes records apart."""
        firsts = order[::_COLUMN]
        follow = (firsts[:, None] + torch.arange(_COLUMN)).flatten()
        if not torch.equal(order, follow) or bool((firsts % _COLUMN).any()):
            return None
        columns = self.data.view(-1, self.data.shape[1] // 2)[firsts // _COLUMN]
        padded = nn.functional.pad(columns, (0, 0, 0, len(columns) % 2))
        return Blocks(self.form, (len(order), self.shape[1]), padded.view(-1, self.data.shape[1]))

    def __getitem__(self, blocks: slice) -> "Blocks":
        """Some of the blocks, which are shared."""
        data = self.data[blocks]
        return Blocks(self.form, (OUTPUTS_PER_BLOCK * len(data), self.shape[1]), data)
