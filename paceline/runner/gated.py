"""Rows of mask tokens in a pass: their embeddings, and factors at linear layers that act on them alone (gated LoRA).

    tokens of a pass      r   a   b   V   V+1  V   V+1      V: size of the vocabulary; mask j is token V + j
    rows (flat)           0   1   2   3   4    5   6
    while the gate is open                3 .. 6            these get mask embeddings, and b (a x) at each gated layer

Every other row goes through the very operations of a pass without an adapter, so its bits are the same. In torch they
hide mask rows from one another by -inf, which a key that overflows would turn into NaN: hence `bounded`. Native passes
take the factors from here (`describe`) and need no bound there: no row reads what is hidden from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from ..errors import DraftError, IncompatibleModels
from ..modules import SpaceAdapter

TAME = 2.0**20
"""Factors that raise the largest input by no more overflow nowhere, so that the pass need not look."""


@final
class Gate:
    """Which rows of the pass in progress are mask tokens: open during such a pass, closed at all other times.

    One for all gated layers of a module tree. A copy is a gate of its own, closed. source: the adapter as it was given;
    `adapter` is the copy that lies where the model does.
    """

    def __init__(self, source: SpaceAdapter, adapter: SpaceAdapter):
        self.source, self.adapter = source, adapter
        self.vocab_size = adapter.config.vocab_size
        self.rows: slice | Tensor | None = None  # of the nodes of all sequences, one after another; a slice is cheaper
        self.num_rows = 0  # of the pass, plain ones included
        self._vectors = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, object]) -> "Gate":
        return Gate(self.source, self.adapter)

    def holds(self, adapter: SpaceAdapter) -> bool:
        """Whether what is worn are this adapter's weights, as they are now, in the precision of the model."""
        if adapter.config != self.adapter.config:
            return False
        pairs = zip(self.adapter.parameters(), adapter.parameters(), strict=True)
        return all(_equal(attached, given.detach().to(attached.device, attached.dtype)) for attached, given in pairs)

    @contextmanager
    def opened(self, token_ids: Tensor, is_mask: Tensor) -> Iterator[Tensor]:
        """Open for a pass over token_ids [B, N]; yields them with token 0 in the place of the masks.

        Raises `DraftError` for ids past the masks.
        """
        found = is_mask.reshape(-1).nonzero()[:, 0]
        which = token_ids.reshape(-1)[found] - self.vocab_size
        first, last, most = torch.stack([found[0], found[-1], which.max()]).tolist()
        if most >= self.adapter.num_masks:
            raise DraftError(
                "a pass holds a mask token that the SPACE adapter does not have",
                got=f"token {self.vocab_size + most}",
                expected=f"below {self.vocab_size + self.adapter.num_masks}: {self.adapter.num_masks} masks",
            )
        self._vectors = bounded(self.adapter.embed(which))
        self.rows = slice(first, last + 1) if last - first + 1 == len(found) else found
        self.num_rows = is_mask.numel()
        try:
            yield token_ids.masked_fill(is_mask, 0)
        finally:
            self.rows, self._vectors = None, torch.empty(0)

    def embed(self, embeddings: Tensor) -> Tensor:
        """Put the mask embeddings in their rows of [..., E], in place; they are what `inputs_embeds` would hold."""
        if self.rows is not None:
            embeddings.view(-1, embeddings.shape[-1])[self.rows] = self._vectors.to(embeddings.dtype)
        return embeddings


@final
class Gated(nn.Module):
    """A linear layer of any kind whose outputs in mask rows are corrected: out[rows] += b (a x[rows]).

    a: [r, in]. b: [out, r].
    """

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, gate: Gate):
        super().__init__()
        self.base, self.gate = base, gate
        self.a = nn.Parameter(a.contiguous(), requires_grad=False)
        self.b = nn.Parameter(b.contiguous(), requires_grad=False)
        # Each output is at most `gain` times the largest input, which is a normed one where keys are made.
        gain = float(a.abs().sum(1, dtype=torch.float32).max() * b.abs().sum(1, dtype=torch.float32).max())
        self.is_tame = a.dtype != torch.float16 and gain <= TAME

    @property
    def in_features(self) -> int:
        """Of the layer below."""
        return int(self.a.shape[1])

    @property
    def out_features(self) -> int:
        """Of the layer below."""
        return int(self.b.shape[0])

    @property
    def weight(self) -> Any:
        """Of the layer below: some architectures ask for its dtype."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """Of the layer below."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.corrected(self.base.forward(x), x)

    def corrected(self, out: Tensor, x: Tensor) -> Tensor:
        """What the layer below made of x, with its mask rows corrected in place."""
        rows = self.gate.rows
        if rows is None:
            return out
        x, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(x) != self.gate.num_rows:
            raise IncompatibleModels(
                "a gated layer does not see the rows of the pass one by one",
                got=f"{len(x)} rows",
                expected=self.gate.num_rows,
                fix="train the adapter without this layer (experts, for example, see the rows routed to them)",
            )
        inner = nn.functional.linear(x[rows], self.a)
        if isinstance(rows, slice):
            flat[rows].addmm_(inner, self.b.t())
        else:
            flat.index_add_(0, rows, nn.functional.linear(inner, self.b))
        if not self.is_tame:
            flat[rows] = bounded(flat[rows])
        return out


def bounded(rows: Tensor) -> Tensor:
    """Mask rows without NaN and so small, in place, that no score of a key made from them overflows.

    A score q k is at most d |q| times the bound, less than what an element holds, with room for the largest q. Values
    of a sound adapter are far below it, but for float16: its bound suits models whose scores are float16 too.
    """
    most = 1024.0 if rows.dtype == torch.float16 else torch.finfo(rows.dtype).max ** 0.5 / 64
    return rows.nan_to_num_(0.0).clamp_(-most, most)


def _equal(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to NaN: broken weights are weights too."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
