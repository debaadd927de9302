"""Draft trees that grow on a GPU: each level is chosen from the one before it without waiting for the host.

The tree is EAGLE-2's (arXiv 2406.16858): of the children of a level the `top_k` with the best paths get children. All
levels are one graph, and their tokens come to the host together; there `DynamicTree` keeps the best of them, within the
budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ...attention.kv_cache import SlotCache
from .trees import DynamicTree


@dataclass(frozen=True, eq=False)
class Levels:
    """The levels of a batch of trees, as lists [B][depth][...].

    tokens, logps: the children of the nodes that a level expands, `top_k` of each, one node after another.
    places: which of them the next level expands, the best first.
    """

    tokens: list[list[list[int]]]
    logps: list[list[list[float]]]
    places: list[list[list[int]]]
    top_k: int

    def replay(self, trees: Sequence[DynamicTree]) -> None:
        """Grow the trees of the host by these levels. Nodes that only the host knows get no children but its own."""
        for row, tree in enumerate(trees):
            known = {0: 0}  # by node of the frontier, where its children are
            while tree.frontier:
                ids, logps, k = self._of(row, tree.level), self._of(row, tree.level, False), self.top_k
                places = (known.get(node) for node in tree.frontier)
                parts = [slice(0) if place is None else slice(place * k, (place + 1) * k) for place in places]
                expanded = known
                tree.add([ids[part] for part in parts], [logps[part] for part in parts])
                known = self._known(row, tree, ids, expanded)

    def _of(self, row: int, level: int, tokens: bool = True) -> list[Any]:
        every: Any = self.tokens if tokens else self.logps
        return every[row][level] if level < len(every[row]) else []

    def _known(self, row: int, tree: DynamicTree, ids: list[int], expanded: dict[int, int]) -> dict[int, int]:
        """Of the nodes that the next level expands here, those that it also expanded on the device."""
        chosen = self._chosen(row, tree.level - 1)
        known = dict[int, int]()
        for node in tree.frontier:
            place = expanded.get(tree.parents[node])
            if place is None:
                continue
            mine = ids[place * self.top_k : (place + 1) * self.top_k]
            if tree.tokens[node] in mine:
                at = chosen.get(place * self.top_k + mine.index(tree.tokens[node]))
                if at is not None:
                    known[node] = at
        return known

    def _chosen(self, row: int, level: int) -> dict[int, int]:
        each = self.places[row][level] if level < len(self.places[row]) else []
        return {place: at for at, place in enumerate(each)}


@final
class DeviceTrees:
    """Grows trees with the layers of a head (`NativeLayer`)."""

    def __init__(self, layer: Any, draft_ids: Tensor):
        self._layer, self._draft_ids = layer, draft_ids
        self._known = dict[Any, _Growth]()

    def grow(
        self, hidden: Tensor, columns: Tensor, logps: Tensor, cache: SlotCache, slots: Sequence[int], depth: int,
        noise: Tensor | None,
    ) -> Levels:  # fmt: skip
        """Trees of `depth` levels behind the committed columns of the slots.

        hidden: of the root [B, 1, E]. columns, logps: its best children [B, k] in the draft vocabulary.
        noise: what is added to the logits of each further level, float32 [depth - 1, B, Vd].
        """
        batch, k = columns.shape
        starts = [cache.lengths[slot] for slot in slots]
        longest = max(starts) + k * max(1, depth - 1)
        cache.ensure(longest)
        self._layer.extend_tables(longest)
        shape, held = (batch, k, depth, noise is not None, -(-longest // 256) * 256), (cache.keys[0], cache.values[-1])
        key = (*shape, cache.capacity, self._layer.max_length, *(tensor.data_ptr() for tensor in held))
        if key not in self._known:
            while len(self._known) >= 64:
                del self._known[next(iter(self._known))]
            self._known[key] = _Growth(self._layer, self._draft_ids, *shape)
        return self._known[key](cache, hidden, columns, logps, starts, slots, noise)


class _Growth:
    """One shape of trees: its buffers, and the computation on them."""

    def __init__(
        self, layer: Any, draft_ids: Tensor, batch: int, k: int, depth: int, noisy: bool, longest: int
    ):  # fmt: skip
        from ...kernels.gpu.graphs import Repeated  # with Triton

        self._layer, self._draft_ids = layer, draft_ids
        self._keys, self._values = list[Tensor](), list[Tensor]()  # during a call: known by their addresses
        self._depth, self._k, self._longest = depth, k, longest
        device = draft_ids.device
        self._numbers = torch.zeros(2, batch, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(batch, 1, layer.hidden_size, device=device)
        self._tokens = torch.zeros(batch, depth, k * k, dtype=torch.long, device=device)
        self._places = torch.zeros(batch, depth, k, dtype=torch.long, device=device)
        self._logps = torch.zeros(batch, depth, k * k, device=device)
        self._noise = torch.zeros(depth - 1, batch, layer.vocabulary, device=device) if noisy else None
        self._columns = torch.zeros(batch, k, dtype=torch.long, device=device)
        self._compute = Repeated(self._levels, device)

    def __call__(
        self, cache: SlotCache, hidden: Tensor, columns: Tensor, logps: Tensor, starts: list[int],
        slots: Sequence[int], noise: Tensor | None,
    ) -> Levels:  # fmt: skip
        staged = torch.tensor([starts, [*slots]], dtype=torch.int32, pin_memory=self._hidden.is_cuda)
        self._numbers.copy_(staged, non_blocking=True)
        self._hidden.copy_(hidden)
        self._columns.copy_(columns)
        self._logps[:, 0, : self._k] = logps
        if self._noise is not None:
            self._noise.copy_(noise)  # type: ignore[arg-type]
        self._keys, self._values = [*cache.keys], [*cache.values]
        self._compute()
        self._keys, self._values = [], []
        found = [self._tokens, self._logps.double(), self._places]
        flat = torch.cat([part.double().flatten(1) for part in found], 1).tolist()  # one copy; tokens are exact in it
        depth, k = self._depth, self._k
        cut = depth * k * k
        each = lambda row, first, size: [row[first + d * size : first + (d + 1) * size] for d in range(depth)]  # noqa: E731
        whole = lambda rows: [[int(number) for number in row] for row in rows]  # noqa: E731
        tokens = [whole(each(row, 0, k * k)) for row in flat]
        for row in tokens:
            row[0] = row[0][:k]
        return Levels(
            tokens, [each(row, cut, k * k) for row in flat], [whole(each(row, 2 * cut, k)) for row in flat], k
        )

    def _levels(self) -> None:
        k, batch = self._k, len(self._hidden)
        starts, slots = self._numbers.unbind()
        hidden, columns, scores = self._hidden, self._columns, self._logps[:, 0, :k]
        place = torch.arange(k, device=hidden.device).expand(batch, k)
        self._tokens[:, 0, :k], self._places[:, 0] = self._draft_ids[columns], place
        parents = place.new_zeros(batch, 0)
        for depth in range(1, self._depth):
            above = place // k if depth > 1 else torch.zeros_like(place)  # the row of the parent
            ids = self._draft_ids[columns.gather(1, place)]
            rows = hidden.gather(1, above[..., None].expand(-1, -1, hidden.shape[2]))
            parents = torch.cat([parents, torch.full_like(above, -1) if depth == 1 else above + (depth - 2) * k], 1)
            noise = None if self._noise is None else self._noise[depth - 1]
            hidden, columns, logps = self._layer.level_on_device(
                self._keys, self._values, starts, slots, ids, rows, parents, k, noise, self._longest
            )
            scores, place = (scores[..., None] + logps).flatten(1).topk(k)
            columns = columns.flatten(1)
            self._tokens[:, depth], self._places[:, depth] = self._draft_ids[columns], place
            self._logps[:, depth] = logps.flatten(1)
