"""Adapters and trained drafts put into a module tree: linear layers that are replaced, and those for mask tokens alone.

Mask tokens of SPACE have embeddings of their own, and low-rank factors at linear layers that act on them alone:

    tokens of a pass      r   a   b   V   V+1  V   V+1      V: size of the vocabulary; mask j is token V + j
    rows (flat)           0   1   2   3   4    5   6
    mask rows                             3 .. 6            these get mask embeddings, and b (a x) at adapted layers

Every other row goes through the very operations of a pass without an adapter, so its bits are the same. In torch mask
rows are hidden by -inf, which a key that overflows would turn into NaN: hence `bounded`. Native passes need no bound.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import DraftError, IncompatibleModels
from ..heads.int4_draft import Int4Draft, Int4DraftConfig
from ..heads.space import Factors, SpaceAdapter, SpaceConfig
from ..quant.fp8 import Fp8Linear
from ..quant.int4 import Int4Linear
from ..quant.int8 import Int8Linear
from ..quant.packed import PackedLinear, Shelf, device_of

_MAX_GAIN = 2.0**20  # factors that raise the largest input by no more cannot overflow: their outputs are not bounded
_LINEARS = (nn.Linear, PackedLinear, Int8Linear, Int4Linear, Fp8Linear)


@final
class AttachedAdapter:
    """An adapter in a model, and which rows of the pass in progress are its mask tokens (none between passes).

    All adapted layers of a module tree share one. A copy of the tree gets another one.
    source: the adapter that the caller gave; adapter: its copy in the dtype and on the device of the model.
    """

    def __init__(self, source: SpaceAdapter, adapter: SpaceAdapter):
        self.source, self.adapter = source, adapter
        self.vocab_size = adapter.config.vocab_size
        self.rows: slice | Tensor | None = None  # of the nodes of all sequences, one after another; a slice is cheaper
        self.num_rows = 0  # of the pass, plain ones included
        self._vectors = torch.empty(0)

    def __deepcopy__(self, memo: dict[int, object]) -> "AttachedAdapter":
        return AttachedAdapter(self.source, self.adapter)

    def holds(self, adapter: SpaceAdapter) -> bool:
        """Whether the attached weights are those of this adapter as they are now, in the precision of the model."""
        if adapter.config != self.adapter.config:
            return False
        same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)  # broken weights are weights too
        pairs = zip(self.adapter.parameters(), adapter.parameters(), strict=True)
        return all(same(attached, given.detach().to(attached.device, attached.dtype)) for attached, given in pairs)

    @contextmanager
    def applied(self, token_ids: Tensor, is_mask: Tensor) -> Iterator[Tensor]:
        """Act on the mask rows of one pass over token_ids [B, N]; yields the ids with 0 in the place of masks.

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
class AdaptedLinear(nn.Module):
    """A linear layer of any kind whose outputs in mask rows are corrected: out[rows] += b (a x[rows]).

    Its factors are a [r, in] and b [out, r].
    """

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, attached: AttachedAdapter):
        super().__init__()
        self.base, self.attached = base, attached
        self.a = nn.Parameter(a.contiguous(), requires_grad=False)
        self.b = nn.Parameter(b.contiguous(), requires_grad=False)
        # Each output is at most `gain` times the largest input, which is a normed one where keys are made.
        gain = float(a.abs().sum(1, dtype=torch.float32).max() * b.abs().sum(1, dtype=torch.float32).max())
        self._is_bounded = a.dtype == torch.float16 or gain > _MAX_GAIN

    def __getattr__(self, name: str) -> Any:
        """The other attributes of a linear layer, such as its sizes or the dtype of its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.corrected(self.base.forward(x), x)

    def corrected(self, out: Tensor, x: Tensor) -> Tensor:
        """What the layer below made of x, with its mask rows corrected in place."""
        rows = self.attached.rows
        if rows is None:
            return out
        x, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(x) != self.attached.num_rows:
            raise IncompatibleModels(
                "an adapted layer does not see the rows of the pass one by one",
                got=f"{len(x)} rows",
                expected=self.attached.num_rows,
                fix="train the adapter without this layer (experts, for example, see the rows routed to them)",
            )
        inner = nn.functional.linear(x[rows], self.a)
        if isinstance(rows, slice):
            flat[rows].addmm_(inner, self.b.t())
        else:
            flat.index_add_(0, rows, nn.functional.linear(inner, self.b))
        if self._is_bounded:
            flat[rows] = bounded(flat[rows])
        return out


def bounded(rows: Tensor) -> Tensor:
    """Mask rows without NaN and so small, in place, that no score of a key made from them overflows.

    A score q k is at most d |q| times the bound, less than what an element holds, with room for the largest q. Values
    of a sound adapter are far below it, but for float16: its bound suits models whose scores are float16 too.
    """
    most = 1024.0 if rows.dtype == torch.float16 else torch.finfo(rows.dtype).max ** 0.5 / 64
    return rows.nan_to_num_(0.0).clamp_(-most, most)


def share_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same tensors: modules may be replaced in it without touching the original.

    An attached adapter is left out: a draft that is made of a target with an adapter drafts as the target alone.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    for path, module in list(made.named_modules()):
        if isinstance(module, AdaptedLinear):
            made.set_submodule(path, module.base)
    return made


def attach_adapter(
    model: PreTrainedModel, adapter: SpaceAdapter, device: torch.device, dtype: torch.dtype
) -> AttachedAdapter:
    """Replace the linear layers that the adapter names by adapted ones, in this module tree.

    The adapter is copied. Raises `IncompatibleModels` where it does not fit the model.
    """
    config, text = adapter.config, model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    sizes = {
        "hidden size": (config.hidden_size, int(text.hidden_size)),
        "number of layers": (config.num_layers, int(text.num_hidden_layers)),
        "vocabulary": (config.vocab_size, int(head.out_features)),
    }
    for what, (got, expected) in sizes.items():
        if got != expected:
            raise IncompatibleModels(f"the SPACE adapter is for another {what}", got=got, expected=expected)
    own = copy.deepcopy(adapter).to(device, dtype).eval().requires_grad_(False)
    attached = AttachedAdapter(adapter, own)
    what = "the SPACE adapter's factors do not fit"
    for index, layer, path, parts in _linears(model, config, what) if config.linears else ():
        base: Any = layer.get_submodule(path)
        factors = [(first, own.factors(index, name)) for first, name in parts]
        layer.set_submodule(path, AdaptedLinear(base, *_joined(factors, int(base.out_features)), attached))
    return attached


def _linears(
    model: PreTrainedModel, config: SpaceConfig | Int4DraftConfig, what: str
) -> Iterator[tuple[int, nn.Module, str, list[tuple[int, str]]]]:
    """The linear layers of a model that hold those named: layer, submodule, first output and name of each part.

    A fused layer holds q, k and v in one matrix, whose rows are those of its parts one below another.

    what: the beginning of the error where the shapes do not fit.
    """
    for index, layer in enumerate(decoder_layers(model, config.num_layers)):
        pieces: dict[str, list[tuple[int, str]]] = {}
        for name, shape in zip(config.linears, config.shapes, strict=True):
            path, first, count = place_of(layer, name)
            expected = (count, int(cast("int", layer.get_submodule(path).in_features)))
            if shape != expected:
                raise IncompatibleModels(f"{what} {name} of layer {index}", got=shape, expected=expected)
            pieces.setdefault(path, []).append((first, name))
        for path, parts in pieces.items():
            yield index, layer, path, sorted(parts)


def decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The list of so many decoder layers. Raises `IncompatibleModels` where there is none."""
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleModels(f"no list of {count} decoder layers was found in this model", got=type(model).__name__)


def place_of(layer: nn.Module, name: str) -> tuple[str, int, int]:
    """Where a linear, named as transformers does, is in a layer: submodule, first of its outputs, how many."""
    places: Any = getattr(layer, "places", {})  # of fused layers, which have no linear of such a name
    if name in places:
        return places[name]
    with suppress(AttributeError):
        found = layer.get_submodule(name)
        if isinstance(found, _LINEARS):
            return name, 0, int(found.out_features)
    raise IncompatibleModels(
        f"this model has no linear layer {name!r} for the SPACE adapter",
        got=type(layer).__name__,
        expected="a linear layer of that name in every decoder layer",
        fix="use an adapter trained for this model",
    )


def _joined(parts: list[tuple[int, Factors]], outputs: int) -> tuple[Tensor, Tensor]:
    """Factors that act on slices of the outputs, as one pair a [R, in], b [outputs, R]."""
    a = torch.cat([factors.a for _, factors in parts])
    b, rank = a.new_zeros(outputs, len(a)), 0
    for first, factors in parts:
        b[first : first + len(factors.b), rank : rank + len(factors.a)] = factors.b
        rank += len(factors.a)
    return a, b


def put_int4(model: PreTrainedModel, draft: Int4Draft) -> list[Int4Linear]:
    """Replace the linear layers that the draft has weights for; the others stay as they are. Returns those made.

    Raises `IncompatibleModels` where layers, names or shapes are others than the draft was trained for.
    """
    config, made, shelf = draft.config, list[Int4Linear](), Shelf()
    shapes = dict(zip(config.linears, config.shapes, strict=True))
    for index, layer, path, parts in _linears(model, config, "the trained self-draft does not fit"):
        old: Any = layer.get_submodule(path)
        names = [name for _, name in parts]
        if sum(shapes[name][0] for name in names) != int(old.out_features):
            raise IncompatibleModels(
                f"the trained self-draft has weights for a part of {path} only",
                got=", ".join(names), expected="all that the layer joins",
            )  # fmt: skip
        codes, params = zip(*(draft.packable(index, name) for name in names), strict=True)
        device = device_of(old)
        made.append(Int4Linear.of(torch.cat(codes).to(device), torch.cat(params, 1).to(device), old.bias, shelf))
        layer.set_submodule(path, made[-1])
    return made
