"""A tree pass whose shapes and addresses never change, so that a device can replay it as a CUDA graph.

Whatever differs between two passes is in buffers. So nothing is read back, and no shape depends on a value.

    slots            0    1    2    3        a pass over slots 1 and 3, 3 nodes each
    rows             0    1    2    3        bucket: slots 0 to 3 (a slice of the cache, not a copy), 4 nodes
    holds          pad  live  pad  live

A padding node of a live row is written behind the row's own nodes; those of a padding row go to a scratch place, the
columns behind those of the first live row:

    columns of slot 1    0 ... start-1 | start .. start+3 | start+4 .. start+7
    holds                committed     | the pass         | scratch of rows 0 and 2: never read
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout, Segment, additive, visible
from ..attention.states import StateStore
from ..core.tree import TokenTree, ancestors
from .torch_decoder import FusedDecoder

NODES = (1, 2, 4, 8, 16, 32, 64)
_MIN_COLUMNS = 256


@dataclass(frozen=True)
class Bucket:
    """The shapes of a static pass: slots `first` to `first + batch - 1`, `nodes` each, reading `columns` columns."""

    first: int
    batch: int
    nodes: int
    columns: int

    @staticmethod
    def of(window: tuple[int, int], nodes: int, length: int, capacity: int) -> "Bucket":
        """The smallest bucket that reads `length` columns of at most `capacity`; `nodes` is one of `NODES`."""
        columns = _MIN_COLUMNS
        while columns < length:
            columns *= 2
        return Bucket(*window, nodes, min(columns, capacity))


def window_of(slots: Sequence[int], num_slots: int) -> tuple[int, int]:
    """First slot and size of the smallest window that contains `slots` and begins at a multiple of its size.

    The size is a power of two, so there are few windows. Example: of 8 slots, 4 and 5 give (4, 2), 3 and 4 give (0, 8).
    """
    low, high, size = min(slots), max(slots), 1
    while low // size != high // size:
        size *= 2
    size = min(size, num_slots)
    return min(low // size * size, num_slots - size), size


@final
class _Writer:
    """Replaces the cache in the layers of a static pass: it writes to the columns that a tensor holds."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], slots: Tensor, columns: Tensor):
        self._layers, self._where = layers, (slots, columns)  # [B, N] each

    def update(self, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Write finite `[B, H, N, d]`, as `SlotCache.update` does for drafts; returns the tensors of all slots."""
        for cached, states in zip(self._layers[index], (key, value), strict=True):
            cached.transpose(1, 2).index_put_(self._where, torch.nan_to_num(states).transpose(1, 2))
        return self._layers[index]


@final
class StaticPass:
    """One bucket: the input buffers of a pass, and the computation on them.

    watched: layers whose hidden states are returned too, numbered as in `attention.states`.
    run: `compute`, or the CUDA graph of it.
    """

    def __init__(
        self, bucket: Bucket, decoder: FusedDecoder, cache: SlotCache, max_length: int, watched: Sequence[int] = ()
    ):
        self.bucket, self._decoder, self._max_length, self._watched = bucket, decoder, max_length, watched
        self._device = decoder.embeddings.device
        self._inputs = torch.zeros(bucket.batch, 3 + 2 * bucket.nodes, dtype=torch.long, device=self._device)
        self._place, self._tokens, self._parents = self._inputs.split((3, bucket.nodes, bucket.nodes), 1)
        self._rows = torch.zeros(0, dtype=torch.long, device=self._device)
        # Kept, not looked up again: a graph reads and writes at the present addresses of these tensors.
        self._layers = list(zip(cache.keys, cache.values, strict=True))
        self._cos, self._sin = decoder.rotations(cache.capacity, decoder.embeddings)
        self.run = self.compute
        self._kinds = {(layer.scores.window, layer.heads // layer.kv_heads) for layer in decoder.layers}

    def load(self, slots: Sequence[int], starts: Sequence[int], tree: TokenTree) -> None:
        """Fill the buffers; does not wait for the device. `starts` are the committed lengths of the slots."""
        bucket, rows = self.bucket, [slot - self.bucket.first for slot in slots]
        padding = [0] * bucket.nodes
        table = [[*self.scratch(slots, starts), *padding, -1, *padding[1:]]] * bucket.batch
        for row, slot, start, own in zip(rows, slots, starts, tree.rows, strict=True):
            rest = padding[len(own) :]
            table[row] = [start, slot, start, *own.token_ids, *rest, *own.parents, *rest]
        numbers = [*itertools.chain(*table), *rows]
        # Pinned, and made anew each time: torch hands the memory out again only after the copy has been made.
        staged = torch.tensor(numbers, pin_memory=self._device.type == "cuda").to(self._device, non_blocking=True)
        self._inputs.copy_(staged[: -len(rows)].view_as(self._inputs))
        self._rows = staged[-len(rows) :]

    def scratch(self, slots: Sequence[int], starts: Sequence[int]) -> tuple[int, int, int]:
        """Committed length of a padding row, and the slot and column that its first node is written to."""
        return 0, slots[0], starts[0] + self.bucket.nodes

    def compute(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [B', N', V] and watched hidden states [B', N', E], by operations of fixed shapes in a fixed order."""
        bucket, decoder = self.bucket, self._decoder
        starts, slots, columns = self._place.unbind(1)
        reach = ancestors(self._parents)
        positions = (starts[:, None] + reach.sum(-1) - 1).clamp_(max=self._max_length - 1)
        offsets = torch.arange(bucket.nodes, device=self._device)
        written = columns[:, None] + offsets
        writer = _Writer(self._layers, slots[:, None].expand_as(written), written)
        segments = {
            (w, g): [self._segment(visible(starts, reach, bucket.columns, w, positions), g)] for w, g in self._kinds
        }
        shape = TokenTree.chain([[0] * bucket.nodes] * bucket.batch)  # the segments hold the masks of the true tree
        layout = PassLayout([0] * bucket.batch, bucket.nodes, shape, batch_invariant=False, _segments=segments)
        x = nn.functional.embedding(self._tokens.flatten(), decoder.embeddings)
        cos, sin = self._cos[positions.view(-1)], self._sin[positions.view(-1)]
        x, hidden_states = decoder.run_layers(x, cos, sin, layout, writer, self._watched)  # type: ignore[arg-type]
        size = (bucket.batch, bucket.nodes, -1)
        return decoder.head(x).view(size), {layer: state.view(size) for layer, state in hidden_states.items()}

    def take(self, result: Tensor, num_nodes: int) -> Tensor:
        """A copy of the live rows and nodes of the result, in the order of `load`. [B, N, V or E]."""
        return result.index_select(0, self._rows)[:, :num_nodes]

    def _segment(self, seen: Tensor, groups: int) -> Segment:
        batch, first, nodes = self.bucket.batch, self.bucket.first, self.bucket.nodes
        mask = additive(seen, self._decoder.embeddings.dtype)[:, :, None].expand(-1, -1, groups, -1)
        mask = mask.reshape(batch, 1, nodes * groups, self.bucket.columns)
        return Segment(slice(0, batch), slice(first, first + batch), slice(0, nodes), mask)


Result = TypeVar("Result")
_MAX_PASSES = 256  # the oldest is dropped first
_WARM_UPS = 2  # before a capture, so that libraries have chosen their kernels and allocated their workspaces


@final
class StaticPasses:
    """The static passes of one model over one cache."""

    def __init__(self, decoder: FusedDecoder, cache: SlotCache, max_length: int):
        self._decoder, self._cache, self._max_length = decoder, cache, max_length
        self._passes: dict[tuple[Bucket, tuple[int, ...]], StaticPass] = {}
        self._built_on: list[Tensor] = []
        self.num_runs = 0

    def __len__(self) -> int:
        return len(self._passes)

    def takes(self, num_nodes: int, row_multiple: int = 1) -> bool:
        """Whether there is a bucket for so many nodes, and the cache has its tensors, which the first pass creates."""
        return max(num_nodes, row_multiple) <= NODES[-1] and len(self._cache) == len(self._decoder.layers)

    def run(
        self, slots: Sequence[int], tree: TokenTree, row_multiple: int = 1, states: StateStore | None = None
    ) -> Tensor:
        """Logits [B, N, V] of every node; keys and values are written after the committed ones, as in any pass.

        Needs `takes(tree.num_nodes, row_multiple)`. Hidden states are written to `states`.
        row_multiple: the smallest number of nodes to compute.
        """
        nodes = next(n for n in NODES if n >= max(tree.num_nodes, row_multiple))
        window = window_of(slots, self._cache.num_slots)
        scratch = nodes if window[1] > len(slots) else 0
        starts = self._cache.begin(slots, nodes + scratch, text=0)
        self._forget_if_moved()
        watched = () if states is None else states.layers
        bucket = Bucket.of(window, nodes, max(starts) + nodes, self._cache.capacity)
        captured = self._passes.get((bucket, watched))
        static = captured or StaticPass(bucket, self._decoder, self._cache, self._max_length, watched)
        static.load(slots, starts, tree)
        if captured is None:  # made with its first pass loaded, so that the warm-up writes what this pass will write
            if len(self._passes) >= _MAX_PASSES:
                del self._passes[next(iter(self._passes))]
            static.run = repeatable(static.compute, self._decoder.embeddings.device)
            self._passes[bucket, watched] = static
        self.num_runs += 1
        logits, hidden_states = static.run()
        if states is not None:
            kept = {layer: static.take(hidden_states[layer], tree.num_nodes) for layer in watched}
            states.write(slots, starts, kept, tree.num_nodes, self._cache.capacity)
        return static.take(logits, tree.num_nodes)

    def _forget_if_moved(self) -> None:
        """Drop all passes if the cache has replaced its tensors."""
        now = self._cache.keys
        if len(now) != len(self._built_on) or any(a is not b for a, b in zip(now, self._built_on, strict=True)):
            self._passes.clear()
            self._built_on = list(now)


@cache
def _memory_pool(device: torch.device) -> torch.cuda.MemPool:
    """The pool that all graphs of a device share: they run one after another, and results are copied after each.

    A pool that no graph uses any more is gone, and a capture into it fails; this object keeps it.
    """
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def repeatable(work: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """`work`, or on a CUDA device its graph. The result of a graph is valid until any graph runs again."""
    if device.type != "cuda":
        return work
    with torch.cuda.device(device):
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_memory_pool(device).id):  # type: ignore[arg-type]  # as its docs say
            out = work()

    def replay() -> Result:
        graph.replay()
        return out

    return replay
