"""Corrections of low rank, b (a x), in the rows of a pass that take them: of mask tokens, of requests with an adapter.

    rows of a pass        r   a   b   c  | r   a   m0  m1       two sequences, of which the first has a LoRA adapter
    takes                 1   1   1   1  | 0   0   2   2        1: its factors; 2: those of SPACE, for mask tokens

Every other row goes through the same operations as without corrections, so its bits are the same. In torch, mask rows
are hidden by adding -inf, which becomes NaN if a key overflows: hence `bounded`. Native passes need no bound.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..hf.corrections import Factors
from ..hf.experts import Experts
from ..kernels import kernels_for
from ..kernels.library import FORMATS
from ..quant.packed import matrix_of_weight, product
from .recurrent_layers import InWaves

if TYPE_CHECKING:
    from transformers import PreTrainedModel
_MAX_GAIN = 2.0**20  # factors that amplify the largest input by no more cannot overflow and need no bound


@final
class LowRank:
    """Corrections of low rank to linear layers, by their paths in the model: out += b (a x) in the rows that take them.

    factors: a [r, in] and b [out, r], in the dtype and on the device of the model.
    is_bounded: see `bounded`.
    """

    def __init__(self, factors: Factors, is_bounded: bool = False):
        self.factors = factors
        # Each output is at most the gain times the largest input; the inputs of key projections are normed.
        self._bounded = {path for path, (a, b) in factors.items() if is_bounded and _may_overflow(a, b)}
        self._products = dict[str, tuple[Any, Any]]()

    def correct(self, path: str, rows: slice | Tensor, out: Tensor, x: Tensor) -> None:
        """Correct these rows of the outputs [R, out] of a layer for x [R, in], in place."""
        if path not in self.factors:
            return
        if path not in self._products:
            self._products[path] = tuple(map(_product_with, self.factors[path]))  # type: ignore[assignment]
        a, b = self._products[path]
        made = b(a(x[rows])).to(out.dtype)
        if isinstance(rows, slice):
            out[rows] += made
        else:
            out.index_add_(0, rows, made)
        if path in self._bounded:
            out[rows] = bounded(out[rows])


def _may_overflow(a: Tensor, b: Tensor) -> bool:
    gain = float(a.abs().sum(1, dtype=torch.float32).max() * b.abs().sum(1, dtype=torch.float32).max())
    return a.dtype == torch.float16 or gain > _MAX_GAIN


def _product_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of rows with a weight [out, in]: by kernels, so that bits of a row do not depend on the others."""
    if weight.dtype in FORMATS and kernels_for(weight.device) is not None:
        return partial(product, matrix_of_weight(weight))
    return lambda x: nn.functional.linear(x, weight)


@dataclass(frozen=True, eq=False)
class Corrections:
    """Which rows of a pass take which corrections. takes: int32 [B, N], from 1 on; 0: none. used: each of them."""

    takes: Tensor
    used: Sequence[LowRank]

    @classmethod
    def of(
        cls, adapters: Sequence[LowRank | None], num_nodes: int, masks: LowRank | None, is_mask: Tensor | None,
        device: torch.device,
    ) -> "Corrections | None":  # fmt: skip
        """adapters: of each row of the batch. masks: what mask rows take. None where no row takes any."""
        used = list(dict.fromkeys(adapter for adapter in adapters if adapter is not None))
        if not used and masks is None:
            return None
        numbers = [0 if adapter is None else 1 + used.index(adapter) for adapter in adapters]
        takes = torch.tensor(numbers, dtype=torch.int32, device=device)[:, None].repeat(1, num_nodes)
        if masks is not None and is_mask is not None:
            used.append(masks)
            takes.masked_fill_(is_mask, len(used))
        return cls(takes, used)

    @cached_property
    def parts(self) -> list[tuple[LowRank, slice | Tensor]]:
        """Each correction and its rows, as indices into the flattened nodes of the batch; a slice is cheaper."""
        flat, parts = self.takes.flatten(), list[tuple[LowRank, slice | Tensor]]()
        for number, low_rank in enumerate(self.used, 1):
            rows = (flat == number).nonzero()[:, 0]
            if len(rows):
                first, last = rows[0].item(), rows[-1].item()
                parts.append((low_rank, slice(first, last + 1) if last - first + 1 == len(rows) else rows))
        return parts


@final
class Corrected:
    """The rows of the pass in progress that take corrections; none between passes.

    All adapted layers of a module tree share one. A copy of the tree gets another one.
    """

    def __init__(self) -> None:
        self.parts: Sequence[tuple[LowRank, slice | Tensor]] = ()  # indices into the flattened nodes of the batch
        self.num_rows = 0  # all rows of the pass, plain ones included

    def __deepcopy__(self, memo: dict[int, object]) -> "Corrected":
        return Corrected()

    @contextmanager
    def by(self, corrections: Corrections | None) -> Iterator[None]:
        """Correct the rows of one pass, if some are to be."""
        if corrections is not None:
            self.parts, self.num_rows = corrections.parts, corrections.takes.numel()
        try:
            yield
        finally:
            self.parts = ()


@final
class AdaptedLinear(nn.Module):
    """A linear layer of any kind whose outputs are corrected in the rows that take corrections."""

    def __init__(self, base: nn.Module, path: str, corrected: Corrected):
        super().__init__()
        self.base, self.path, self.corrected = base, path, corrected

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes, such as sizes or the weight, to the base layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.add_to(self.base.forward(x), x)

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """The outputs of the base layer for x, corrected in place."""
        if not self.corrected.parts:
            return out
        x, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(x) != self.corrected.num_rows:
            raise IncompatibleModels(
                "an adapted layer does not get all rows of the pass",
                got=f"{len(x)} rows",
                expected=self.corrected.num_rows,
                fix="train the adapter without this layer (experts, for example, only get the rows routed to them)",
            )
        for low_rank, rows in self.corrected.parts:
            low_rank.correct(self.path, rows, flat, x)
        return out


def bounded(rows: Tensor) -> Tensor:
    """Replace NaN in mask rows and limit their values, in place, so that no attention score of a mask overflows.

    A score q k is at most d |q| times the bound, which stays below the largest number of the dtype. Values of a working
    adapter are far smaller, except in float16, whose bound is for models with scores in float16.
    """
    most = 1024.0 if rows.dtype == torch.float16 else torch.finfo(rows.dtype).max ** 0.5 / 64
    return rows.nan_to_num_(0.0).clamp_(-most, most)


def adapt(model: "PreTrainedModel", paths: Iterable[str], corrected: Corrected) -> None:
    """Let these linear layers of a module tree be corrected."""
    for path in paths:
        if not isinstance(linear := model.get_submodule(path), AdaptedLinear):
            model.set_submodule(path, AdaptedLinear(linear, path, corrected))


def check_can_adapt(model: "PreTrainedModel", path: str) -> None:
    """Raise `IncompatibleModels` for a linear layer that no pass of transformers' layers can correct."""
    parent, _, name = path.rpartition(".")
    above = [model.get_submodule(path.rsplit(".", depth)[0]) for depth in (1, 2) if path.count(".") >= depth]
    if isinstance(above[0], InWaves):
        reason = "which reads tokens one by one"
    elif isinstance(above[-1], Experts):
        reason = "which not all rows reach"
    else:
        return
    message = f"an adapter cannot change {name} of {parent}, {reason}"
    raise IncompatibleModels(message, fix="train the adapter without this layer")
