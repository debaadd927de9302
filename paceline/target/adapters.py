"""Attaches SPACE adapters and trained INT4 drafts to a model.

The mask tokens of SPACE have embeddings of their own, and low-rank factors at linear layers that act on them only:

    tokens of a pass      r   a   b   V   V+1  V   V+1      V: size of the vocabulary; mask j is token V + j
    rows (flat)           0   1   2   3   4    5   6
    mask rows                             3 .. 6            these get mask embeddings, and b (a x) at adapted layers

`corrections` has what these factors do.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from ..errors import DraftError, IncompatibleModels
from ..quant.int4 import int4_linear
from ..quant.packed import PackedLinear, QuantizedLinear, WeightArena, device_of
from .corrections import AdaptedLinear, LowRank, bounded, check_can_adapt

if TYPE_CHECKING:
    from transformers import PreTrainedModel
_LINEARS = (nn.Linear, PackedLinear, QuantizedLinear)


class LinearShapes(Protocol):
    """The linear layers of every decoder layer that something is for, and (outputs, inputs) of each."""

    num_layers: int
    linears: Any
    shapes: Any


class MaskAdapter(Protocol):
    """The embeddings of mask tokens, and their factors; `methods.space.adapter` has the module."""

    config: Any

    @property
    def num_masks(self) -> int:
        """How many mask tokens it has."""
        ...

    def embed(self, which: Tensor) -> Tensor:
        """Embeddings of mask tokens, counted from 0. [R] -> [R, E]."""
        ...

    def factors(self, layer: int, linear: str) -> Any:
        """The factors `a` and `b` of a linear layer."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As those of any module."""
        ...


class RoundedDraft(Protocol):
    """The weights of a few bits of a self-draft; `methods.self_int4.head` has the module."""

    config: Any

    def packable(self, layer: int, linear: str) -> tuple[Tensor, Tensor]:
        """Codes and params of a linear layer, as `quant.int4` packs them."""
        ...


@final
class AttachedAdapter:
    """A SPACE adapter of a model, and the mask rows of the pass in progress (none between passes).

    source: the adapter that the caller passed.
    adapter: its copy in the dtype and on the device of the model.
    low_rank: its factors.
    """

    def __init__(self, source: MaskAdapter, adapter: MaskAdapter, low_rank: LowRank):
        self.source, self.adapter, self.low_rank = source, adapter, low_rank
        self.vocab_size = adapter.config.vocab_size
        self.rows: slice | Tensor | None = None  # indices into the flattened nodes of the batch; a slice is cheaper
        self._vectors = torch.empty(0)

    def matches(self, adapter: MaskAdapter) -> bool:
        """Whether the attached weights equal the adapter's present ones, in the precision of the model."""
        if adapter.config != self.adapter.config:
            return False
        same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
        pairs = zip(self.adapter.parameters(), adapter.parameters(), strict=True)
        return all(same(attached, weight.detach().to(attached.device, attached.dtype)) for attached, weight in pairs)

    @contextmanager
    def applied(self, token_ids: Tensor, is_mask: Tensor) -> Iterator[Tensor]:
        """Apply the adapter to the mask rows of one pass over token_ids [B, N]; yields the ids with 0 for each mask.

        Raises `DraftError` for a mask that the adapter does not have.
        """
        rows = is_mask.reshape(-1).nonzero()[:, 0]
        which = token_ids.reshape(-1)[rows] - self.vocab_size
        first, last, most = torch.stack([rows[0], rows[-1], which.max()]).tolist()
        if most >= self.adapter.num_masks:
            raise DraftError(
                "a pass holds a mask token that the SPACE adapter does not have",
                got=f"token {self.vocab_size + most}",
                expected=f"below {self.vocab_size + self.adapter.num_masks}: {self.adapter.num_masks} masks",
            )
        self._vectors = bounded(self.adapter.embed(which))
        self.rows = slice(first, last + 1) if last - first + 1 == len(rows) else rows
        try:
            yield token_ids.masked_fill(is_mask, 0)
        finally:
            self.rows, self._vectors = None, torch.empty(0)

    def embed(self, embeddings: Tensor) -> Tensor:
        """Write the mask embeddings into their rows of `inputs_embeds` [..., E], in place."""
        if self.rows is not None:
            embeddings.view(-1, embeddings.shape[-1])[self.rows] = self._vectors.to(embeddings.dtype)
        return embeddings


def share_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """A second module tree over the same tensors, whose modules can be replaced without changing the original.

    An attached adapter is not copied, so that a self-draft of a target with an adapter drafts without it.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    for path, module in list(copied.named_modules()):
        if isinstance(module, AdaptedLinear):
            copied.set_submodule(path, module.base)
    return copied


def fitted(model: "PreTrainedModel", adapter: MaskAdapter, device: torch.device, dtype: torch.dtype) -> AttachedAdapter:
    """A copy of a SPACE adapter, for a model. Raises `IncompatibleModels` if it does not fit the model."""
    config, text = adapter.config, model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    sizes = {
        "hidden size": (config.hidden_size, int(text.hidden_size)),
        "number of layers": (config.num_layers, int(text.num_hidden_layers)),
        "vocabulary": (config.vocab_size, int(head.out_features)),
    }
    for subject, (got, expected) in sizes.items():
        if got != expected:
            raise IncompatibleModels(f"the SPACE adapter is for another {subject}", got=got, expected=expected)
    fresh: Any = copy.deepcopy(adapter)
    own, paths = fresh.to(device, dtype).eval().requires_grad_(False), {m: path for path, m in model.named_modules()}
    message, factors = "the SPACE adapter's factors do not fit", dict[str, tuple[Tensor, Tensor]]()
    for index, layer, name in _linears(model, config, message) if config.linears else ():
        path, pair = f"{paths[layer]}.{name}", own.factors(index, name)
        check_can_adapt(model, path)
        factors[path] = pair.a.detach().contiguous(), pair.b.detach().contiguous()
    return AttachedAdapter(adapter, own, LowRank(factors, is_bounded=True))


def _linears(model: "PreTrainedModel", config: LinearShapes, message: str) -> Iterator[tuple[int, nn.Module, str]]:
    """The linear layers of a config: index of the decoder layer, the layer, and the name in it.

    message: the beginning of the error message if shapes do not fit.
    """
    for index, layer in enumerate(decoder_layers(model, config.num_layers)):
        for name, shape in zip(config.linears, config.shapes, strict=True):
            linear = _linear_of(layer, name)
            expected = (int(linear.out_features), int(linear.in_features))
            if shape != expected:
                raise IncompatibleModels(f"{message} {name} of layer {index}", got=shape, expected=expected)
            yield index, layer, name


def decoder_layers(model: "PreTrainedModel", count: int) -> nn.ModuleList:
    """The module list of this many decoder layers. Raises `IncompatibleModels` if there is none."""
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleModels(f"no list of {count} decoder layers was found in this model", got=type(model).__name__)


def _linear_of(layer: nn.Module, name: str) -> Any:
    """The linear layer of this name."""
    with suppress(AttributeError):
        linear = layer.get_submodule(name)
        if isinstance(linear, _LINEARS):
            return linear
    raise IncompatibleModels(
        f"this model has no linear layer {name!r} for the SPACE adapter",
        got=type(layer).__name__,
        expected="a linear layer of that name in every decoder layer",
        fix="use an adapter trained for this model",
    )


def put_int4(model: "PreTrainedModel", draft: RoundedDraft) -> list[QuantizedLinear]:
    """Replace the linear layers that the draft has weights for; returns the new layers.

    Raises `IncompatibleModels` if layers, names or shapes differ from those that the draft was trained for.
    """
    config, linears, arena = draft.config, list[QuantizedLinear](), WeightArena()
    for index, layer, name in _linears(model, config, "the trained self-draft does not fit"):
        old: Any = layer.get_submodule(name)
        codes, params = (packed.to(device_of(old)) for packed in draft.packable(index, name))
        linears.append(int4_linear(codes, params, config.bits, old.bias, cast("torch.dtype", model.dtype), arena))
        layer.set_submodule(name, linears[-1])
    return linears
