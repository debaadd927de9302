"""Put a SPACE adapter on a model: gated factors over whatever linear layers it has, fused and quantised ones included.

A fused layer holds q, k and v in one matrix, so their factors become one pair: a's below one another, b's on the
diagonal, each at the outputs of its own linear.

    [q]   [b_q        ] [a_q]
    [k] += [          ] [a_v] x         here nothing acts on k
    [v]   [        b_v]
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import IncompatibleModels
from ..modules import SpaceAdapter
from ..modules.space import Factors
from ..quant import Fp8Linear, Int4Linear, Int8Linear, PackedLinear
from .fused import FusedLayer
from .gated import Gate, Gated

_LINEARS = (nn.Linear, PackedLinear, Int8Linear, Int4Linear, Fp8Linear)


def share_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A second module tree over the same tensors: modules may be replaced in it without touching the original.

    An adapter is not copied: a draft made of a target that wears one drafts as the target alone.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    for path, module in list(made.named_modules()):
        if isinstance(module, Gated):
            made.set_submodule(path, module.base)
    return made


def put_on(model: PreTrainedModel, adapter: SpaceAdapter, device: torch.device, dtype: torch.dtype) -> Gate:
    """Replace the linear layers that the adapter names by gated ones, in this module tree; returns their gate.

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
    gate = Gate(adapter, own)
    if not config.linears or not config.rank:
        return gate
    for index, layer in enumerate(decoder_layers(model, config.num_layers)):
        pieces: dict[str, list[tuple[int, Factors]]] = {}
        for name in config.linears:
            path, first, count = place_of(layer, name)
            factors = own.factors(index, name)
            if factors is None:
                raise IncompatibleModels("the SPACE adapter lacks factors", got=f"none for {name} of layer {index}")
            shape = (count, int(layer.get_submodule(path).in_features))  # type: ignore[arg-type]
            if (len(factors.b), factors.a.shape[1]) != shape:
                got = (len(factors.b), factors.a.shape[1])
                raise IncompatibleModels(
                    f"the SPACE adapter's factors do not fit {name} of layer {index}", got=got, expected=shape
                )
            pieces.setdefault(path, []).append((first, factors))
        for path, parts in pieces.items():
            base = layer.get_submodule(path)
            layer.set_submodule(path, Gated(base, *_joined(parts, int(base.out_features)), gate))  # type: ignore[arg-type]
    return gate


def decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The list of so many decoder layers. Raises `IncompatibleModels` where there is none."""
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleModels(f"no list of {count} decoder layers was found in this model", got=type(model).__name__)


def place_of(layer: nn.Module, name: str) -> tuple[str, int, int]:
    """Where a linear, named as transformers does, is in a layer: submodule, first of its outputs, how many."""
    if isinstance(layer, FusedLayer):
        if name in layer.places:
            return layer.places[name]
    else:
        try:
            found = layer.get_submodule(name)
        except AttributeError:
            found = None
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
