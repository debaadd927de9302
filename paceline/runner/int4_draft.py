"""Put the trained weights of a self-draft into a module tree, whatever stands in the place of its linear layers now."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import IncompatibleModels
from ..modules.int4_draft import Int4Draft
from ..quant import Int4Linear
from ..quant.packed import Shelf, device_of
from .adapter import decoder_layers, place_of


def put_int4(model: PreTrainedModel, draft: Int4Draft) -> list[Int4Linear]:
    """Replace the linear layers that the draft has weights for; the others stay as they are. Returns those made.

    A fused layer holds q, k and v in one matrix, whose rows are those of its parts one below another. Raises
    `IncompatibleModels` where layers, names or shapes are others than the draft was trained for.
    """
    config, made, place = draft.config, list[Int4Linear](), Shelf()
    layers = decoder_layers(model, config.num_layers)
    for index, layer in enumerate(layers):
        pieces: dict[str, list[tuple[int, str, int]]] = {}
        for name, (outputs, inputs) in zip(config.linears, config.shapes, strict=True):
            path, first, count = place_of(layer, name)
            found: Any = layer.get_submodule(path)
            if (count, int(found.in_features)) != (outputs, inputs):
                raise IncompatibleModels(
                    f"the trained self-draft does not fit {name} of layer {index}",
                    got=(count, int(found.in_features)), expected=(outputs, inputs),
                )  # fmt: skip
            pieces.setdefault(path, []).append((first, name, outputs))
        for path, parts in pieces.items():
            old: Any = layer.get_submodule(path)
            parts.sort()
            if sum(count for _, _, count in parts) != int(old.out_features):
                raise IncompatibleModels(
                    f"the trained self-draft has weights for a part of {path} only",
                    got=", ".join(name for _, name, _ in parts), expected="all that the layer joins",
                )  # fmt: skip
            both = [draft.packable(index, name) for _, name, _ in parts]
            codes, params = torch.cat([c for c, _ in both]), torch.cat([p for _, p in both], 1)
            device = device_of(old)
            made.append(Int4Linear.of(codes.to(device), params.to(device), old.bias, place))
            layer.set_submodule(path, made[-1])
    return made
