"""The layout of weights [out, in] for the kernels: blocks of 32 outputs, so that one load reads many outputs.

format      tensor                                  a weight
BF16        [blocks, in / 2, 32, 2]                 itself; pairs of inputs are adjacent
F16, F32    [blocks, in, 32]                        itself
INT8        [blocks, in / 4, 32, 4]                 code * the output's scale
INT4        [blocks, in / 8, 32], int32             (code - 8) * the group's scale + zero; bits 4 j hold input 2 j,
                                                    bits 16 + 4 j input 2 j + 1
BF12        [blocks, in / 4, 192], uint8            a bfloat16 in twelve bits, without loss, see `bf12.h`
Q4_K, ...   [blocks, bytes], uint8                  those of llama.cpp's files, see `block_formats.h`

Outputs are padded with zeros to whole blocks, inputs to a multiple of 2 (BF16), 4 (INT8, BF12) or 8 (INT4).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .library import BlockFormat, pack_blocks, record_bytes, shorten, unpack_blocks, unpack_outputs, widen

OUTPUTS_PER_BLOCK = 32
_MOST_RARE = 1 / 256  # of the weights; with more of them, patches take too long


def _blocks(weight: Tensor, together: int) -> Tensor:
    """[out, in] -> [blocks, 32, in / together, together]."""
    outs, ins = weight.shape
    padded = nn.functional.pad(weight, (0, -ins % together, 0, -outs % OUTPUTS_PER_BLOCK))
    return padded.view(len(padded) // OUTPUTS_PER_BLOCK, OUTPUTS_PER_BLOCK, -1, together)


def pack(weight: Tensor) -> Tensor:
    """bfloat16, float16, float32 or int8 [out, in]."""
    together = {torch.bfloat16: 2, torch.int8: 4}.get(weight.dtype, 1)
    blocks = _blocks(weight, 2 if together == 1 else together)
    if together == 1:
        return blocks.flatten(2).transpose(1, 2).contiguous()
    return blocks.transpose(1, 2).contiguous()


def unpack(packed: "Tensor | Bf12 | Blocks", outs: int, ins: int) -> Tensor:
    """What `pack` or `Bf12.of` was given, [out, in]; blocks as float32."""
    if isinstance(packed, Bf12):
        return widen(packed.table, packed.units, packed.patches, outs, ins)
    if isinstance(packed, Blocks):
        return unpack_blocks(packed.form, packed.data, 0, outs, ins)
    packed = packed.transpose(1, 2)
    if packed.dim() == 4:
        packed = packed.flatten(2)
    return packed.reshape(-1, packed.shape[2])[:outs, :ins].contiguous()


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
        found = shorten(weight.contiguous(), table, units, patches, room)
        return None if found < 0 else cls(units, table, patches[: blocks + 1 + found].clone())

    def __getitem__(self, blocks: slice) -> "Bf12":
        """Some of the blocks; their units are shared."""
        begins = self.patches[blocks.start : blocks.stop + 1]
        patches = self.patches[len(self.units) + 1 :][int(begins[0]) : int(begins[-1])]
        return Bf12(self.units[blocks], self.table, torch.cat([begins - begins[0], patches]))


_COLUMN = 16  # outputs of a record
_PIECE = 1 << 20  # bytes, about, that are packed at once


@dataclass(eq=False)
class Blocks:
    """Weights in a block format of llama.cpp's files.

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
        """From the bytes of a file, in threads.

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

    def rows(self, indices: Sequence[int]) -> Tensor:
        """The weights of some outputs, float32 [R, in]."""
        return unpack_outputs(self.form, self.data, indices, self.shape[1])

    def values(self, places: Sequence[int]) -> Tensor:
        """The weights at these places of the flattened matrix, float32. Of each, one block is unpacked."""
        each, ins = self.form.inputs, self.shape[1]
        outputs = list[int]()  # of a matrix with one block in a row, as which the same records can be read
        for place in places:
            row, column = divmod(place, ins)
            outputs.append((row // _COLUMN * (ins // each) + column // each) * _COLUMN + row % _COLUMN)
        blocks = unpack_outputs(self.form, self.data, outputs, each)
        return blocks[torch.arange(len(places)), torch.tensor([place % ins % each for place in places])]

    def __getitem__(self, blocks: slice) -> "Blocks":
        """Some of the blocks, which are shared."""
        data = self.data[blocks]
        return Blocks(self.form, (OUTPUTS_PER_BLOCK * len(data), self.shape[1]), data)


_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def pack_codes(codes: Tensor) -> Tensor:
    """INT4 codes 0..15 of any integer type [out, in], in a multiple of 8."""
    eights = _blocks(codes.int(), 8).transpose(1, 2)
    joined = eights[..., 0].clone(memory_format=torch.contiguous_format)
    for i, shift in enumerate(_SHIFTS[1:], 1):
        joined |= eights[..., i] << shift
    return joined


def unpack_codes(packed: Tensor, outs: int, ins: int) -> Tensor:
    """int32 [out, in]."""
    eights = torch.stack([packed >> shift & 15 for shift in _SHIFTS], -1).transpose(1, 2)
    return eights.reshape(-1, ins)[:outs].contiguous()


def pack_params(params: Tensor) -> Tensor:
    """Scales and zeros bfloat16 [in / group, out, 2] -> [blocks, in / group, 32, 2]."""
    groups, outs, _ = params.shape
    padded = nn.functional.pad(params, (0, 0, 0, -outs % OUTPUTS_PER_BLOCK))
    return padded.view(groups, -1, OUTPUTS_PER_BLOCK, 2).transpose(0, 1).contiguous()


def unpack_params(packed: Tensor, outs: int) -> Tensor:
    """bfloat16 [in / group, out, 2]."""
    return packed.transpose(0, 1).flatten(1, 2)[:, :outs].contiguous()
