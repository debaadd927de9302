"""Rows of mask tokens in a pass: their embeddings, and factors at linear layers that act on them alone (gated LoRA).

    tokens of a pass      r   a   b   V   V+1  V   V+1      V: size of the vocabulary; mask j is token V + j
    rows (flat)           0   1   2   3   4    5   6
    while the gate is open                3 .. 6            these get mask embeddings, and b (a x) at each gated layer

Every other row goes through the very operations of a pass without an adapter, so its bits are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from ..errors import IncompatibleModels
from ..modules import SpaceAdapter


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

    @contextmanager
    def opened(self, token_ids: Tensor, is_mask: Tensor) -> Iterator[Tensor]:
        """Open for a pass over token_ids [B, N]; yields them with token 0 in the place of the masks."""
        found = is_mask.reshape(-1).nonzero()[:, 0]
        first, last = found[[0, -1]].tolist()
        self._vectors = self.adapter.embed(token_ids.reshape(-1)[found] - self.vocab_size)
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
        return out
