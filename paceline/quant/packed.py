"""Linear layers whose weights lie as the native kernels read them, see `kernels.packing`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kernels.library import FORMATS, Matrix, address, ask_large_pages, library, multiply
from ..kernels.packing import pack, packed_bytes, unpack

_PAGE, _LINE = 2 << 20, 64


class PackedLinear(nn.Module):
    """A linear layer on CPU in bfloat16, float16 or float32; a row's bits do not depend on how many rows there are."""

    def __init__(self, linear: nn.Linear, place: Callable[[Tensor], Tensor] | None = None):
        """place: puts the packed weight where it shall lie."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = pack(linear.weight.detach())
        self.packed: Tensor
        self.register_buffer("packed", packed if place is None else place(packed), persistent=False)
        self.bias = linear.bias

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """True iff there are kernels for this layer here."""
        weight = linear.weight
        return weight.device.type == "cpu" and weight.dtype in FORMATS and library() is not None

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in], made anew on every read."""
        return unpack(self.packed, self.out_features, self.in_features)

    @property
    def matrix(self) -> "Described":
        """As the kernels take it."""
        return Described(self, self.packed, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        return self.matrix(x)


class Described:
    """A `Matrix` and the tensors that it points to."""

    def __init__(
        self,
        linear: nn.Module,
        packed: Tensor,
        bias: Tensor | None,
        scales: Tensor | None = None,
        sums: Tensor | None = None,
        group: int = 0,
    ):
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.held = (packed, scales, sums)
        form = FORMATS.get(packed.dtype, 3 if packed.dtype is torch.int8 else 4)
        self.outs, self.ins = int(linear.out_features), int(linear.in_features)  # type: ignore[arg-type]
        self.struct = Matrix(
            data=address(packed), scales=address(scales), sums=address(sums), bias=address(self.bias),
            outs=self.outs, ins=self.ins, format=form, group=group,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `x`."""
        return multiply(self.struct, x.reshape(-1, self.ins).float()).view(*x.shape[:-1], self.outs).to(x.dtype)


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` that fits, freeing the plain weights that nothing else holds; returns how many."""
    found = [(name, one) for name, one in model.named_modules() if type(one) is nn.Linear and PackedLinear.fits(one)]
    place = Shelf(sum(packed_bytes(one.weight) for _, one in found))
    for name, module in found:
        model.set_submodule(name, PackedLinear(module, place))
    return len(found)


class Shelf:
    """One piece of memory for all weights of a model, on large pages where the system has them.

    A pass reads it whole: with a page for every 4 KB it took 6% longer.
    """

    def __init__(self, size: int):
        self._memory = torch.empty(size + _PAGE if size else 0, dtype=torch.uint8)
        self._used = -self._memory.data_ptr() % _PAGE
        ask_large_pages(self._memory)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor, copied to the next free place."""
        end = self._used + tensor.nbytes
        placed = self._memory[self._used : end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._used += -(-tensor.nbytes // _LINE) * _LINE
        return placed
