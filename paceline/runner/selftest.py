"""A model is held against itself when it is loaded: rows of a tree must equal plain transformers.

Architectures differ in how they place positions, masks and windows. Rather than trust a list, the runner compares a
branching pass over a few made-up tokens with what the untouched model says about each path on its own.
"""

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.tree import TokenTree
from ..errors import IncompatibleModels, NumericsError
from ..quant import Quantized
from .kv_cache import SlotCache
from .layout import PassLayout

if TYPE_CHECKING:
    from .hf_adapter import LoadedModel
    from .model_runner import ModelRunner

Reference: TypeAlias = list[Tensor]
"""Logits [V] after each of `_PATHS`, from the model's own attention without a cache."""

_PREFIX = 5
_PARENTS = [-1, 0, 0, 1, 2]  # root -> 1 -> 3 and root -> 2 -> 4
_PATHS = ([1, 3], [2, 4])
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 0.02}  # of the logits' standard deviation
_IN_16_BITS = 0.35


def tolerance(loaded: "LoadedModel") -> float:
    """How far logits may be apart, in standard deviations: as in 16 bits where layers round what they are given."""
    rounds = any(isinstance(layer, Quantized) for layer in loaded.model.modules())
    return _IN_16_BITS if rounds else _TOLERANCE.get(loaded.dtype, _IN_16_BITS)


def _tokens(vocab_size: int) -> list[int]:
    """Made-up tokens: the prefix, then one for each node of the tree."""
    return [(7919 * i + 13) % vocab_size for i in range(1, _PREFIX + len(_PARENTS) + 1)]


@torch.inference_mode()
def plain_reference(model: PreTrainedModel) -> Reference:
    """What the model says before anything is routed through our attention."""
    embeddings = model.get_input_embeddings().weight  # type: ignore[union-attr]
    tokens = _tokens(embeddings.shape[0])  # type: ignore[arg-type]
    rows = []
    for path in _PATHS:
        ids = tokens[: _PREFIX + 1] + [tokens[_PREFIX + node] for node in path]
        logits = model(torch.tensor([ids], device=embeddings.device), use_cache=False).logits  # type: ignore[arg-type]
        rows.append(logits[0, -1].float())
    return rows


@torch.inference_mode()
def own_reference(loaded: "LoadedModel") -> Reference:
    """What a model that transformers cannot run itself says about each path, read as plain text."""
    tokens = _tokens(loaded.model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, arg-type]
    rows = []
    for path in _PATHS:
        ids = tokens[: _PREFIX + 1] + [tokens[_PREFIX + node] for node in path]
        cache = SlotCache(1, len(ids))
        starts = cache.begin([cache.allocate()], len(ids), whole=loaded.attends_trees)
        layout = PassLayout(starts, len(ids), None, False, device=loaded.device)
        rows.append(loaded.forward(torch.tensor([ids], device=loaded.device), layout, cache)[0, -1].float())
    return rows


def check_against_reference(runner: "ModelRunner") -> None:
    """Raise `IncompatibleModels` if a branching pass does not say what plain transformers said."""
    loaded = runner.loaded
    tokens = _tokens(loaded.model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr, arg-type]
    if runner.max_length < len(tokens):
        return
    slot = runner.cache.allocate()
    try:
        runner.prefill(slot, tokens[:_PREFIX])
        logits = runner.forward([slot], TokenTree.from_lists([tokens[_PREFIX:]], [_PARENTS], loaded.device)).logits[0]
    finally:
        runner.cache.release(slot)
    for path, expected in zip(_PATHS, loaded.reference, strict=True):
        if not expected.isfinite().all():
            raise NumericsError(
                f"{loaded.name} gives NaN or infinite logits",
                expected="finite numbers",
                fix="load it in another dtype (dtype='float32' or 'bfloat16'), or fetch the weights again",
            )
        error = (logits[path[-1]].float() - expected).abs().max() / expected.std().clamp(min=1e-6)
        if not error <= (most := tolerance(loaded)):  # a NaN fails too
            raise IncompatibleModels(
                f"{loaded.name} does not give the same logits for a tree as for its paths",
                got=f"a difference of {float(error):.3g} standard deviations",
                expected=f"at most {most}",
                fix="this architecture cannot be decoded in trees; decode it with plain transformers",
            )
