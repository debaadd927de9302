"""The structures of the native library (`abi.h`) with tensors in the place of addresses, for kernels on a GPU.

So whatever describes a model or a pass for the library of the CPU describes it here, too.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .. import library


@dataclass(eq=False)
class Matrix:
    """A linear layer [outs, ins].

    data: None: there is no such layer. What it and `scales` hold is told by `formats`.
    group: inputs that share a scale, where a format leaves that open.
    input_bits: 8: rows are rounded to e4m3 before a product with weights in FP8.
    place: in each list of corrections; 0: it takes none.
    """

    data: Tensor | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None
    outs: int = 0
    ins: int = 0
    format: int = 0
    input_bits: int = 16
    group: int = 32
    place: int = 0

    @property
    def struct(self) -> "Matrix":
        """Itself, as `PackedMatrix` has the structure of the library."""
        return self

    def part(self, first: int, last: int) -> "Matrix":
        """Outputs `first` .. `last` - 1, which are shared."""
        cut = lambda tensor: None if tensor is None else tensor[first:last]  # noqa: E731
        return replace(self, data=cut(self.data), scales=cut(self.scales), bias=cut(self.bias), outs=last - first)


def _twin(kind: type[ctypes.Structure]) -> Any:
    """A class with the fields of a structure: numbers 0, pointers None, structures their twins."""

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        for name, what in kind._fields_:  # type: ignore[misc]
            setattr(self, name, _empty(what))
        for name, value in [*zip((field[0] for field in kind._fields_), given, strict=False), *named.items()]:
            setattr(self, name, value)

    return type(kind.__name__, (), {"__init__": __init__, "__doc__": kind.__doc__})


def _empty(what: Any) -> Any:
    if what is library.Matrix:
        return Matrix()
    if what in _TWINS:
        return _TWINS[what]()
    if issubclass(what, ctypes.Array):
        return [_empty(what._type_) for _ in range(what._length_)]
    return 0 if issubclass(what, ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float) else None


_TWINS: dict[Any, Any] = {}
for _kind in (library.Norm, library.Recurrent, library.Layer, library.Model, library.Pass):
    _TWINS[_kind] = _twin(_kind)
Norm, Recurrent, Layer, Model, Pass = _TWINS.values()


@dataclass(eq=False)
class Inputs:
    """The numbers that a pass reads, int32 on its device: of each row of the batch [B], and of the nodes.

    sizes: the nodes of each tree. bases, steps: see `abi.h`, zeros without recurrent layers. ids: [B N].
    parents: [B (old + N)], None: chains. ends, firsts: see `abi.h`, [B N].
    longest: no row reads more columns than that.
    """

    starts: Tensor
    slots: Tensor
    offsets: Tensor
    sizes: Tensor
    bases: Tensor
    steps: Tensor
    ids: Tensor
    parents: Tensor | None
    ends: Tensor | None
    firsts: Tensor | None
    longest: int


class Pointers(list[object]):
    """As `library.Pointers`, for kernels that take tensors, and lists of numbers."""

    def tensor(self, tensor: Tensor | None) -> Tensor | None:
        assert tensor is None or tensor.is_contiguous()
        return tensor

    def floats(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().float().contiguous()

    def tensors(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return list(tensors)

    def arrays(self, arrays: Sequence[Any]) -> list[Any]:
        return [*arrays]

    def integers(self, numbers: Iterable[int]) -> list[int]:
        return [*numbers]

    def structures(self, kind: Any, structures: Sequence[Any], size: int = 0) -> list[Any]:
        return [*structures, *(kind() for _ in range(size - len(structures)))]

    def pointer(self, structure: Any) -> Any:
        return structure


def address(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself, in the place of the address that `library.address` gives."""
    return tensor


def addresses(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """As `address`, of many."""
    return list(tensors)


def start_of(array: list[Any]) -> list[Any]:
    """The array itself, see `library.start_of`."""
    return array
