"""Passes at fixed addresses, which a device replays as CUDA graphs.

A pass is staged: the numbers that it reads are copied into buffers, in one piece, and its results out of others. The
first pass of a shape runs as it is, the second is captured, and from then on there is one launch for a pass. Trees are
padded to the sizes `NODES`, so that there are few shapes; what pads them writes nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from .passes import compute
from .structures import Inputs, Model, Pass

NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_FEWEST_COLUMNS = 256
_MOST = 256  # shapes that are kept of a model; the oldest is dropped first
_TENSORS = ("rows", "inputs", "noise", "corrected")  # copied into buffers
_HELD = ("keys", "values", "cos", "sin", "states", "recurrent_states", "recurrent_rows")  # known by their addresses
_RESULTS = ("logits", "last_hidden", "top_ids", "top_logps")
_is_on = True


@contextmanager
def off() -> Iterator[None]:
    """Run every pass as it is."""
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before


def run(model: Model, step: Pass) -> None:
    """Run a pass. Raises IndexError for unknown tokens."""
    if isinstance(step.ids, list) and model.embeddings is not None:
        if not 0 <= min(step.ids) <= max(step.ids) < model.vocabulary:
            raise IndexError(f"a token has no embedding: ids are below {model.vocabulary}")
    is_once = step.nodes > NODES[-1] or step.max_position < 0 or step.deepstack is not None
    if is_once:
        return _Staged(model, step, step.nodes).run(step)
    nodes = step.nodes
    if step.head_rows in (0, nodes):  # else the rows with logits would not be the last
        nodes = next(count for count in NODES if count >= nodes)
    known, key = vars(model).setdefault("staged", {}), _key(step, nodes)
    if key not in known:
        while len(known) >= _MOST:
            del known[next(iter(known))]
        known[key] = _Staged(model, step, nodes)
    known[key].run(step)


def _key(step: Pass, nodes: int) -> tuple[Any, ...]:
    """What must not differ between two passes of which one is a replay of the other."""
    held = (tensor for name in _HELD for tensor in getattr(step, name) or ())
    tensors = (getattr(step, name) for name in (*_TENSORS, *_RESULTS))
    shapes = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]
    exact = nodes == step.nodes
    return (
        step.batch, nodes, step.nodes if exact else None, step.old, step.head_rows and step.nodes - step.head_rows,
        step.sizes is None, step.parents is None, step.ids is None, step.kv_only, step.top, step.max_position,
        step.capacity, step.state_columns, step.state_row, step.block_ends is None, step.block_firsts is None,
        step.windowed_blocks, _columns(step), *map(id, step.corrections or ()),
        *(None if tensor is None else tensor.data_ptr() for tensor in held),
        *(shape if exact else shape is None for shape in shapes),
    )  # fmt: skip


def _columns(step: Pass) -> int:
    """The columns that a pass may read, rounded up so that few numbers occur."""
    longest, columns = max(step.starts) + step.old + step.nodes, _FEWEST_COLUMNS
    while columns < longest:
        columns *= 2
    return min(columns, max(step.capacity, longest))


@final
class _Staged:
    """One shape of a pass of a model: its buffers, and the computation on them."""

    def __init__(self, model: Model, step: Pass, nodes: int):
        self._model, self._nodes, batch = model, nodes, step.batch
        self._device = device = step.keys[0].device
        self._pass: Any = copy(step)  # with tensors of its own where they may differ
        self._pass.nodes = nodes
        for name in ("starts", "slots", "offsets", "bases", "steps", "ids", "parents", "block_ends", "block_firsts"):
            setattr(self._pass, name, None)
        self._pass.sizes = step.sizes is not None or nodes > step.nodes  # whether there are any
        more = nodes - step.nodes
        for name in (*_TENSORS, *_RESULTS):
            given = getattr(step, name)
            if given is not None:
                wide = name != "noise" and given.dim() > 1
                shape = (batch, given.shape[1] + more, *given.shape[2:]) if wide else given.shape
                setattr(self._pass, name, torch.zeros(shape, dtype=given.dtype, device=device))
        self._pass.head_rows = step.head_rows + (more if step.head_rows else 0)
        sizes = [batch] * 6 + [batch * nodes]
        sizes += [batch * (step.old + nodes)] * (step.parents is not None)
        sizes += [batch * nodes] * ((step.block_ends is not None) + (step.block_firsts is not None))
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = iter(self._numbers.split(sizes))
        optional = lambda given: None if given is None else next(parts)  # noqa: E731
        self.inputs = Inputs(
            *(next(parts) for _ in range(7)),
            *map(optional, (step.parents, step.block_ends, step.block_firsts)), _columns(step),
        )  # fmt: skip
        self._compute = Repeated(lambda: compute(self._model, self._pass, self.inputs), device)

    def run(self, step: Pass) -> None:
        """Run the pass on what another one of the same shape reads, and copy the results to where it wants them."""
        self._load(step)
        for name in _HELD:
            setattr(self._pass, name, getattr(step, name))
        self._compute()
        for name in _HELD:  # a cache that was replaced is not kept alive
            setattr(self._pass, name, None)
        for name in _RESULTS:
            wanted = getattr(step, name)
            if wanted is not None and wanted.numel():
                wanted.copy_(getattr(self._pass, name)[:, : wanted.shape[1]])

    def _load(self, step: Pass) -> None:
        """Copy what a pass reads; does not wait for the device."""
        batch, nodes, old, more = (
            step.batch,
            step.nodes,
            step.old,
            self._nodes - step.nodes,
        )  # passes of several sizes share this
        none = [0] * batch
        numbers = [*step.starts, *step.slots, *(step.offsets or none), *(step.sizes or [nodes] * batch)]
        numbers += [*(step.bases or none), *(step.steps or none)]
        later = list[tuple[Tensor, Tensor]]()

        def add(given: Any, each: int, to: Tensor, pad: int) -> None:
            """The next numbers, `each` for a row of the batch, and what pads them."""
            if isinstance(given, Tensor) and given.device.type != "cpu":
                later.append((to.view(batch, each + more)[:, :each], given.reshape(batch, each)))
                numbers.extend([pad] * (batch * (each + more)))
                return
            flat = given.flatten().tolist() if isinstance(given, Tensor) else given
            for row in range(batch):
                numbers.extend(flat[row * each : (row + 1) * each])
                numbers.extend([pad] * more)

        add([0] * (batch * nodes) if step.ids is None else step.ids, nodes, self.inputs.ids, 0)
        if step.parents is not None:
            add(step.parents, old + nodes, self.inputs.parents, -1)
        for given, to in ((step.block_ends, self.inputs.ends), (step.block_firsts, self.inputs.firsts)):
            if given is not None:
                add(given, nodes, to, 0)
        staged = torch.tensor(numbers, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._numbers.copy_(staged, non_blocking=True)
        for to, given in later:
            to.copy_(given)
        for name in _TENSORS:
            given = getattr(step, name)
            if given is not None:
                own = getattr(self._pass, name)
                (own if own.shape == given.shape else own[:, : given.shape[1]]).copy_(given)


@final
class Repeated:
    """Work on tensors at fixed addresses: the first time as it is, so that all is compiled, later as a graph."""

    def __init__(self, work: Callable[[], object], device: torch.device):
        self._work, self._device, self._ran = work, device, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._ran and _is_on and self._device.type == "cuda":
            self._graph = self._captured()
        if self._graph is not None and _is_on:
            self._graph.replay()
        else:
            self._work()
            self._ran = True

    def _captured(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._device):
            graph, pool = torch.cuda.CUDAGraph(), _memory_pool(self._device).id
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
                self._work()
        return graph


@cache
def _memory_pool(device: torch.device) -> torch.cuda.MemPool:
    """The pool that all graphs of a device share: they run one after another. It stays while no graph uses it."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()
