"""The attention and the MLP of each layer of a native model one by one, for the search of layers to skip."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels import library as kernels
from .native import NativeDecoder
from .runner import ModelRunner


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
        self._decoder, self._runner, self._slots, self._chains = decoder, runner, slots, chains
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
        batch, nodes = len(self._chains), len(self._chains[0])
        starts = [cache.lengths[slot] for slot in self._slots]
        size = model.head.outs if model.head.data else model.hidden
        out = torch.empty(batch, nodes, size)
        call = kernels.Pass(batch=batch, nodes=nodes, max_position=self._runner.max_length - 1, head_rows=nodes)
        call.ids, call.rows = pointers.integers(chain.from_iterable(self._chains)), pointers.tensor(rows)
        call.starts, call.slots = pointers.integers(starts), pointers.integers(self._slots)
        cache.begin(self._slots, nodes)
        decoder.point(call, cache, max(starts) + nodes, layer)
        if model.head.data:
            call.logits = kernels.address(out)
        else:
            call.last_hidden = kernels.address(out)
        kernels.run(model, call)
        return out
