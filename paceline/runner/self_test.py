"""A model is held against itself when it is loaded: rows of a tree must equal plain transformers.

Architectures differ in how they place positions, masks and windows. Rather than trust a list, the runner compares a
branching pass over a few made-up tokens with what the untouched model says about each path on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout
from ..core.tree import TokenTree
from ..core.vision import VisionPrompt
from ..errors import ConfigError, IncompatibleModels, NumericsError
from ..hf.image_prompts import process, prompt_of
from ..hf.vision import Vision, language_model
from ..quant import Quantized

if TYPE_CHECKING:
    from .loaded import LoadedModel
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


_CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
_OPERATIONS = {"cpu": 1e11, "cuda": 1e14}
_SKIPPED = ("text_replacement_offsets", "labels", "return_metadata")


@dataclass(eq=False)
class Sight:
    """What the untouched model says after a chat with a picture: logits [V].

    checked: for each kind of numerics, invariant or not, whether a runner agreed; they read prompts differently.
    """

    token_ids: Sequence[int]
    prompt: VisionPrompt
    logits: Tensor
    checked: set[bool] = field(default_factory=set[bool])


@torch.inference_mode()
def plain_sight(model: PreTrainedModel, vision: Vision) -> Sight | None:
    """Ask the whole model before its halves are parted; None where it cannot be asked cheaply, or has no processor."""
    picture = Image.linear_gradient("L").resize((48, 32)).convert("RGB")
    if vision.processor is None:
        return None
    try:
        inputs = process(vision, _CHAT, [picture])
        ids, prompt = prompt_of(vision, inputs, [picture])
    except ConfigError:  # no template, or one that takes no pictures: nobody can ask it anything
        return None
    text = language_model(model)
    weights = sum(p.numel() for p in text.parameters())
    if 2 * weights * len(ids) > _OPERATIONS.get(model.device.type, 0.0):
        return None
    given = {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
        if name not in _SKIPPED
    }
    return Sight(ids, prompt, model(**given, use_cache=False).logits[0, -1].float())


def check_sight(runner: "ModelRunner") -> None:
    """Raise `IncompatibleModels` if the runner does not say what the untouched model said of the picture."""
    sight, loaded = runner.loaded.sight, runner.loaded
    if sight is None or runner.invariant in sight.checked or len(sight.token_ids) >= runner.max_length:
        return
    slot = runner.admit(sight.token_ids, sight.prompt)
    try:
        runner.read(slot, sight.token_ids, sight.prompt)
        root = TokenTree.chain([[sight.token_ids[-1]]], loaded.device)
        logits = runner.forward([slot], root).logits[0, 0].float()
    finally:
        runner.cache.release(slot)
        runner.reader.forget()
    error = (logits - sight.logits).abs().max() / sight.logits.std().clamp(min=1e-6)
    if not error <= (most := tolerance(loaded)):  # a NaN fails too
        raise IncompatibleModels(
            f"{loaded.name} does not say of a picture what plain transformers says",
            got=f"a difference of {float(error):.3g} standard deviations",
            expected=f"at most {most}",
            fix="this model cannot be decoded here; decode it with plain transformers",
        )
    sight.checked.add(runner.invariant)
