"""Linear layers with weights in the layout of the native kernels (see `kernels.packing`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels import library
from ..kernels.build import load
from ..kernels.library import FORMATS, BlockFormat, Matrix, NumberFormat, address, ask_large_pages, multiply
from ..kernels.packing import (
    OUTPUTS_PER_BLOCK,
    Bf12,
    Blocks,
    pack,
    unpack,
)

_FORMATS = {**FORMATS, torch.uint8: NumberFormat.BF12}
_PIECE, _PAGE, _LINE = 32 << 20, 2 << 20, 64
Place: TypeAlias = Callable[[Tensor], Tensor]
"""Copies a packed weight to its final place in memory, see `WeightArena`."""


def in_place(packed: Tensor) -> Tensor:
    """A `Place` that does not copy."""
    return packed


def has_kernels(device: torch.device) -> bool:
    """True iff the native library multiplies on this device."""
    return kernels.kernels_for(device) is library


def gpu_kernels(device: torch.device) -> Any:
    """The kernels of a GPU, if this device has them; None otherwise."""
    found = kernels.kernels_for(device)
    return None if found is library else found


def blocks_of(
    form: BlockFormat, shape: tuple[int, int], read: Callable[[slice], Tensor], device: torch.device, **room: Any
) -> Any:
    """Weights in blocks for the kernels of a device, see `Blocks.of`."""
    gpu = gpu_kernels(device)
    return Blocks.of(form, shape, read, **room) if gpu is None else gpu.Blocks.of(form, shape, read, device)


def device_of(linear: nn.Module) -> torch.device:
    """The device of a linear layer's weights, in whatever format."""
    return next(iter([*linear.parameters(), *linear.buffers()])).device


class QuantizedLinear(nn.Module):
    """A linear layer with rounded weights, whose buffers are codes and scales."""

    in_features: int
    out_features: int
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in], computed on every read."""
        raise NotImplementedError

    @property
    def matrix(self) -> Any:
        """The weights for the kernels of its device; None if torch multiplies."""
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return sum(held.nbytes for held in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        if (matrix := self.matrix) is not None:
            return product(matrix, x)
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class CodedLinear(QuantizedLinear):
    """Codes and scales as `kernels.gpu.formats` has them; without kernels of a GPU torch multiplies."""

    form: ClassVar[str]
    codes: Tensor
    scales: Tensor

    def __init__(self, shape: Sequence[int], codes: Tensor, scales: Tensor, bias: Tensor | None):
        super().__init__()
        (self.out_features, self.in_features), self.bias = shape, bias
        self.codes, self.scales = nn.Buffer(codes, persistent=False), nn.Buffer(scales, persistent=False)
        self.group_size, self.input_bits = self.in_features, 16

    @property
    def matrix(self) -> Any:
        """The weights for the kernels of a GPU; None if torch multiplies."""
        if (gpu := gpu_kernels(self.codes.device)) is None:
            return None
        bias = None if self.bias is None else self.bias.detach().float()
        return gpu.Matrix(
            self.codes, self.scales, bias, outs=self.out_features, ins=self.in_features, group=self.group_size,
            format=getattr(gpu, self.form), input_bits=self.input_bits,
        )  # fmt: skip


class PackedLinear(nn.Module):
    """A linear layer on CPU in bfloat16, float16 or float32. The bits of a row do not depend on the number of rows.

    With AVX-512, bfloat16 is stored in twelve bits, without loss: other kernels would take too long to widen it.
    """

    def __init__(self, linear: nn.Linear, place: Place = in_place):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        widens = weight.dtype is torch.bfloat16 and str(load().isa).startswith(("avx512", "amx"))
        short = Bf12.of(weight) if widens else None
        self.packed = nn.Buffer(place(pack(weight) if short is None else short.units), persistent=False)
        self.table = None if short is None else nn.Buffer(short.table, persistent=False)
        self.patches = None if short is None else nn.Buffer(short.patches, persistent=False)
        self.bias = linear.bias

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """True iff there are kernels for this layer here."""
        weight = linear.weight
        return has_kernels(weight.device) and weight.dtype in FORMATS

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in], unpacked on every read."""
        return unpack(self.matrix.packed, self.out_features, self.in_features)

    @property
    def matrix(self) -> "PackedMatrix":
        """The weights for the native kernels."""
        packed = self.packed
        if self.table is not None and self.patches is not None:
            packed = Bf12(packed, self.table, self.patches)
        return PackedMatrix(self.out_features, self.in_features, packed, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        return self.matrix(x)


@dataclass(eq=False)
class PackedMatrix:
    """A `Matrix` of the kernels and the tensors that it points to.

    packed: the weights in blocks of outputs.
    input_bits: 8 or 16, of the integers that `Blocks` are multiplied with.
    """

    outs: int
    ins: int
    packed: Tensor | Bf12 | Blocks
    bias: Tensor | None
    input_bits: int = 8

    def __post_init__(self) -> None:
        self.bias = None if self.bias is None else self.bias.detach().float().contiguous()
        data, table, patches, form = self.packed, None, None, None
        if isinstance(data, Bf12):
            data, table, patches = data.units, data.table, data.patches
        elif isinstance(data, Blocks):
            data, form = data.data, data.form
        self.struct = Matrix(
            data=address(data), bias=address(self.bias), table=address(table), patches=address(patches),
            outs=self.outs, ins=self.ins, format=_FORMATS[data.dtype] if form is None else form,
            input_bits=self.input_bits,
        )  # fmt: skip

    def part(self, first: int, last: int) -> "PackedMatrix":
        """Outputs `first` .. `last` - 1 as a separate matrix; packed again if the first is within a block."""
        cut = slice(first, last)
        packed, bias = self.packed, None if self.bias is None else self.bias[cut]
        if first % OUTPUTS_PER_BLOCK == 0:
            packed = packed[first // OUTPUTS_PER_BLOCK : -(-last // OUTPUTS_PER_BLOCK)]
        elif isinstance(packed, Blocks):
            packed = packed.part(first, last)
        else:
            packed = pack(unpack(packed, self.outs, self.ins)[cut])
        return PackedMatrix(last - first, self.ins, packed, bias, self.input_bits)

    def rows(self, order: Tensor) -> "PackedMatrix":
        """These outputs, in this order, as a separate matrix. Blocks are unpacked if records would be taken apart."""
        packed, bias = self.packed, None if self.bias is None else self.bias[order]
        if isinstance(packed, Blocks):
            moved = packed.moved(order)
            packed = pack(packed.rows(order.tolist())) if moved is None else moved
        else:
            packed = pack(unpack(packed, self.outs, self.ins)[order])
        return PackedMatrix(len(order), self.ins, packed, bias, self.input_bits)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        return multiply(self.struct, x.reshape(-1, self.ins).float()).view(*x.shape[:-1], self.outs).to(x.dtype)


def product(matrix: Any, x: Tensor) -> Tensor:
    """[..., in] -> [..., out], in the dtype of `x`, by the kernels of its device."""
    return matrix(x) if isinstance(matrix, PackedMatrix) else gpu_kernels(x.device).product(matrix, x)


def matrix_of_weight(weight: Tensor) -> Any:
    """A weight [out, in] for the kernels of its device."""
    if has_kernels(weight.device):
        return PackedMatrix(len(weight), weight.shape[1], pack(weight), None)
    return kernels.kernels_for(weight.device).Matrix(weight, outs=len(weight), ins=weight.shape[1])


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with this weight."""
    linear = nn.Linear.__new__(nn.Linear)  # whose own start draws weights, which takes longer than all else
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return linear


def pack_linears(model: nn.Module, kind: Callable[[nn.Linear, Place], nn.Module] = PackedLinear) -> int:
    """Replace every `nn.Linear` that fits by a `PackedLinear`, or another `kind`; returns how many."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and PackedLinear.fits(module)]
    place = WeightArena()
    for name in names:  # one by one, so that plain and packed weights are never both in memory completely
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, kind(linear, place))
    return len(names)


class WeightArena:
    """Contiguous memory for the weights of a model, on large pages if the system has them.

    A pass reads all weights: with pages of 4 KB it took 6% longer, with 4-bit weights 20% to 30% longer.
    """

    def __init__(self):
        self._free = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor, copied to the next free place."""
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next free place, as a tensor whose values are undefined."""
        size = prod(shape) * dtype.itemsize
        if size > len(self._free):
            self._free = self._memory(size)
        placed = self._free[:size].view(dtype).view(*shape)
        self._free = self._free[-(-size // _LINE) * _LINE :]
        return placed

    def _memory(self, size: int) -> Tensor:
        """The next piece, of at least so many bytes."""
        memory = torch.empty(max(size, _PIECE) + _PAGE, dtype=torch.uint8)  # the system gives it as it is used
        memory = memory[-memory.data_ptr() % _PAGE :]
        ask_large_pages(memory)
        return memory

    def close(self) -> None:
        """Nothing more is placed; what was stays."""
        self._free = self._free[:0]
