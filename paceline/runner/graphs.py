"""Static passes, one for each bucket of shapes: captured once as a CUDA graph, then replayed without Python.

At one token a pass a GPU waits for its host: some hundred small kernels are launched one after another. A graph
launches them all at once. On other devices the very same passes are computed operation by operation.

A graph holds addresses. When the cache grows its tensors are new ones, and every graph is thrown away.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar, final

import torch
from torch import Tensor

from ..core.tree import TokenTree
from .fused import FusedDecoder
from .kv_cache import SlotCache
from .states import States
from .static_pass import NODES, Bucket, StaticPass, window_of

Result = TypeVar("Result")
_MOST = 256  # buckets kept; the oldest goes first
_WARM_UPS = 2  # before a capture, so that libraries have chosen their kernels and made their workspaces


@final
class StaticPasses:
    """The static passes of one model over one cache."""

    def __init__(self, decoder: FusedDecoder, cache: SlotCache, max_length: int):
        self._decoder, self._cache, self._max_length = decoder, cache, max_length
        self._passes: dict[tuple[Bucket, tuple[int, ...]], tuple[StaticPass, Callable[[], tuple[Tensor, States]]]] = {}
        self._built_on: list[Tensor] = []
        self.num_runs = 0

    def __len__(self) -> int:
        return len(self._passes)

    def takes(self, num_nodes: int, row_multiple: int = 1) -> bool:
        """Whether there is a bucket for so many nodes, and the cache has its tensors: the first pass makes them."""
        return max(num_nodes, row_multiple) <= NODES[-1] and len(self._cache) == len(self._decoder.layers)

    def run(self, slots: Sequence[int], tree: TokenTree, row_multiple: int = 1, states: States | None = None) -> Tensor:
        """Logits [B, N, V] of every node; keys and values lie behind the committed ones, as after any pass.

        row_multiple: no fewer nodes than these are computed. Needs `takes(tree.num_nodes, row_multiple)`. Fills in the
        hidden states [B, N, E] that `states` asks for.
        """
        nodes = next(n for n in NODES if n >= max(tree.num_nodes, row_multiple))
        window = window_of(slots, self._cache.num_slots)
        scratch = nodes if window[1] > len(slots) else 0
        starts = self._cache.begin(slots, nodes + scratch, drafts=True)
        self._forget_if_moved()
        watched = tuple(states or ())
        bucket = Bucket.of(window, nodes, max(starts) + nodes, self._cache.capacity)
        found = self._passes.get((bucket, watched))
        made = found[0] if found else self._new(bucket, watched)
        made.load(slots, starts, tree)
        if found is None:  # captured with its first pass loaded: warming up writes what the pass itself will write
            if len(self._passes) >= _MOST:
                del self._passes[next(iter(self._passes))]
            found = self._passes[bucket, watched] = made, repeatable(made.compute, self._decoder.embeddings.device)
        self.num_runs += 1
        logits, passing = found[1]()
        for layer in states or ():
            states[layer] = made.take(passing[layer], tree.num_nodes)  # type: ignore[index]
        return made.take(logits, tree.num_nodes)

    def _new(self, bucket: Bucket, watched: tuple[int, ...]) -> StaticPass:
        return StaticPass(bucket, self._decoder, self._cache, self._max_length, watched)

    def _forget_if_moved(self) -> None:
        """Drop what was built on other tensors than the cache has now."""
        now = self._cache.keys
        if len(now) != len(self._built_on) or any(a is not b for a, b in zip(now, self._built_on, strict=True)):
            self._passes.clear()
            self._built_on = list(now)


@cache
def _memory_pool(device: torch.device):
    """Shared by all graphs of a device: they run one after another, and results are copied out after each."""
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


def repeatable(work: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """`work`, or on a CUDA device its recording; what a recording returns holds until any recording runs again."""
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
        with torch.cuda.graph(graph, pool=_memory_pool(device)):
            out = work()

    def replay() -> Result:
        graph.replay()
        return out

    return replay
