"""Corrections of low rank, b (a x), to linear layers, as native passes list them.

A layer that can be corrected has a place, one for each matrix that its outputs are cut into. A list holds the factors
of every place; a pass says which list each of its rows takes (`kernels/abi.h`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..quant.packed import PackedMatrix, matrix_of_weight

MAX_RANK = 256
"""The largest rank, `INNER` of `pass.h`."""
Factors: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""a [rank, in] and b [out, rank] by the path of the linear layer in its model."""


class Places:
    """The places of a described model, and lists for them."""

    def __init__(self, model: nn.Module, kernels: Any):
        self._paths = {module: path.replace(".base.", ".") for path, module in model.named_modules()}  # see `Skipped`
        self._of_path, self._count = dict[str, list[int]](), 0
        self._kernels, self._lists = kernels, WeakKeyDictionary[Any, Any]()

    def check(self, factors: Factors) -> None:
        """Raise `IncompatibleModels` for factors of a layer that has no place, and for too large a rank."""
        for path, (a, _) in factors.items():
            if path not in self._of_path:
                message = "native passes cannot change a layer that an adapter is for"
                raise IncompatibleModels(message, got=path, fix="train the adapter without this layer")
            if len(a) > MAX_RANK:
                message = "the rank of an adapter is too large"
                raise IncompatibleModels(message, got=f"{len(a)} for {path}", expected=f"at most {MAX_RANK}")

    def give(self, linear: nn.Module, parts: Sequence[Any]) -> None:
        """Give places to the matrices of a layer, unless it was made for the description alone."""
        if (path := self._paths.get(linear)) is not None:
            self._of_path[path] = [*range(self._count + 1, self._count + 1 + len(parts))]
            self._count += len(parts)
            for part, place in zip(parts, self._of_path[path], strict=True):
                part.place = place

    def prepare(self, owner: Any, factors: Factors) -> int:
        """Make the list of these factors; returns the bytes of their copies in it."""
        self.listed(owner, factors)
        copies = [one.packed for one in self._lists[owner][0] if isinstance(one, PackedMatrix)]
        return sum(one.nbytes for one in copies if isinstance(one, Tensor))

    def listed(self, owner: Any, factors: Factors) -> Any:
        """The list of these factors, made once for their owner, with whom it ends. Layers without a place are left."""
        if owner not in self._lists:
            held, listed = self._kernels.Pointers(), [self._kernels.Matrix() for _ in range(2 * self._count + 2)]
            for path, (a, b) in factors.items():
                places = self._of_path.get(path, [])
                for place, part in zip(places, b.chunk(max(1, len(places))), strict=False):
                    made = [matrix_of_weight(factor.detach().contiguous()) for factor in (a, part)]
                    held += made
                    listed[2 * place : 2 * place + 2] = [matrix.struct for matrix in made]
            self._lists[owner] = held, held.structures(self._kernels.Matrix, listed)
        return self._lists[owner][1]
