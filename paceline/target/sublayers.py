"""The attention and the MLP of each layer of a native model one by one, for the search of layers to skip."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ..core.tree import TokenTree
from ..errors import ConfigError
from ..kernels import library as kernels
from .loaded import LoadedModel
from .native import NativeDecoder
from .runner import ModelRunner

_ROUNDS, _TRIES = 5, 3  # of timings of sub-layers and of passes; the least counts


class Sublayers:
    """Runs sub-layers over chains of tokens, each behind the committed columns of its slot.

    Sub-layer 2 i is the attention of layer i, 2 i + 1 its MLP. Raises `ConfigError` for a model that has no native
    passes on a CPU.
    """

    def __init__(self, runner: ModelRunner, slots: Sequence[int], chains: Sequence[Sequence[int]]):
        decoder = runner.loaded.decoder
        if not isinstance(decoder, NativeDecoder) or decoder.described.kernels is not kernels:
            raise ConfigError(
                "only native passes on a CPU search for layers to skip", got=runner.loaded.name,
                fix='name them: {"method": "self_skip", "attention": [5], "mlp": [5, 6]}',
            )  # fmt: skip
        self._decoder, self._runner, self._slots, self.chains = decoder, runner, slots, chains
        self._model, self._held = decoder.described.model, kernels.Pointers()
        self.count = 2 * self._model.num_layers
        self._alone = [self._part(index) for index in range(self.count)]
        self._first, self._last = self._part(), self._part(head=self._model.head)

    def embedded(self) -> Tensor:
        """What the first sub-layer reads. float32 [B, N, E]."""
        return self._run(self._first, 0, None)

    def run(self, index: int, rows: Tensor) -> Tensor:
        """float32 [B, N, E] -> the same, with what the sub-layer adds; its keys and values are written."""
        return self._run(self._alone[index], index // 2, rows)

    def logits(self, rows: Tensor) -> Tensor:
        """float32 [B, N, E] behind all layers -> float32 [B, N, V]."""
        return self._run(self._last, 0, rows)

    def _part(self, index: int | None = None, head: kernels.Matrix | None = None) -> kernels.Model:
        """A model of one layer, with this sub-layer alone or with none."""
        layer = kernels.Layer.from_buffer_copy(self._model.layers[(index or 0) // 2])
        if index is None or index % 2:
            layer.q.data = layer.latent = None
        if index is None or not index % 2:
            layer.up.data = layer.experts = None
        model = kernels.Model.from_buffer_copy(self._model)
        model.layers, model.num_layers = self._held.structures(kernels.Layer, [layer]), 1
        model.head = head or kernels.Matrix()
        return model

    def _run(self, model: kernels.Model, layer: int, rows: Tensor | None) -> Tensor:
        decoder, cache, pointers = self._decoder, self._runner.cache, kernels.Pointers()
        batch, nodes = len(self.chains), len(self.chains[0])
        starts = [cache.lengths[slot] for slot in self._slots]
        size = model.head.outs if model.head.data else model.hidden
        out = torch.empty(batch, nodes, size)
        call = kernels.Pass(batch=batch, nodes=nodes, max_position=self._runner.max_length - 1, head_rows=nodes)
        call.ids, call.rows = pointers.integers(chain.from_iterable(self.chains)), pointers.tensor(rows)
        call.starts, call.slots = pointers.integers(starts), pointers.integers(self._slots)
        cache.begin(self._slots, nodes)
        decoder.point(call, cache, max(starts) + nodes, layer)
        if model.head.data:
            call.logits = kernels.address(out)
        else:
            call.last_hidden = kernels.address(out)
        kernels.run(model, call)
        return out


@dataclass(frozen=True)
class Seconds:
    """Of each sub-layer and of the output layer over one row, and of passes over 1, 2, ... rows."""

    parts: Sequence[float]
    head: float
    passes: Sequence[float]


def measured(target: LoadedModel, context: int, deepest: int) -> Seconds:
    """What they take behind so many columns, which hold zeros; passes verify up to `deepest` tokens."""
    runner = ModelRunner(target, 1, context + deepest + 1)
    slot = runner.cache.allocate()
    runner.cache.lengths[slot] = max(runner.max_length - deepest - 1, 0)
    passes = [min(runner.pass_seconds(rows) for _ in range(_TRIES)) for rows in range(1, deepest + 2)]
    parts = Sublayers(runner, [slot], [[0]])
    rows, least = parts.embedded(), [float("inf")] * (parts.count + 1)
    for _ in range(_ROUNDS):  # one after another, so that each finds the caches of the CPU as in a pass
        for index in range(parts.count + 1):
            begin = time.perf_counter()
            _ = parts.run(index, rows) if index < parts.count else parts.logits(rows)
            least[index] = min(least[index], time.perf_counter() - begin)
    return Seconds(least[:-1], least[-1], passes)


def continued(target: LoadedModel, prompts: Sequence[Sequence[int]], length: int, step: int, nodes: int) -> Sublayers:
    """Chains of so many tokens in the likeliest texts after prompts, one every `step` tokens up to `length`."""
    starts = range(0, length - nodes + 1, step)
    runner = ModelRunner(target, len(prompts) * (1 + len(starts)), max(map(len, prompts)) + length + nodes)
    texts = [[*ids] for ids in prompts]
    held = [runner.cache.allocate() for _ in texts]
    for slot, ids in zip(held, texts, strict=True):
        runner.extend_cache(slot, ids[:-1])
    for _ in range(length):
        logits = runner.forward(held, TokenTree.chain([ids[-1:] for ids in texts], target.device))
        runner.commit(held, [[] for _ in held])
        for ids, token in zip(texts, logits[:, 0].argmax(-1).tolist(), strict=True):
            ids.append(token)
    slots, chains = list[int](), list[list[int]]()
    for slot, prompt, ids in zip(held, prompts, texts, strict=True):
        page = runner.cache.copy_of(slot, 0, runner.cache.lengths[slot])
        for end in (len(prompt) - 1 + start for start in starts):
            slots.append(runner.cache.allocate())
            runner.cache.restore(slots[-1], [page], end)
            chains.append(ids[end : end + nodes])
    return Sublayers(runner, slots, chains)
