"""Compares a model with plain transformers when it is loaded: the logits of a tree, and those after an image.

Architectures differ in how they handle positions, masks and windows. So a branching pass over a few made-up tokens is
compared with each path on its own. The chat with a made-up image is skipped if it would take long.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from ..core.tree import TokenTree
from ..core.vision import VisionPrompt
from ..errors import ConfigError, IncompatibleModels, NumericsError
from ..hf.checkpoint import refused
from ..hf.entrance import on_device
from ..hf.experts import num_experts_of
from ..hf.image_prompts import model_inputs, process_chat, prompt_of
from ..hf.load import KV_CACHE, is_recurrent
from ..hf.vision import Vision, is_vlm
from ..quant.packed import QuantizedLinear
from .loaded import ImageReference, LoadedModel
from .prefill import reference_logits
from .runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel
_PREFIX = 5
_PARENTS = [-1, 0, 0, 1, 2]  # root -> 1 -> 3 and root -> 2 -> 4
_PATHS = ([1, 3], [2, 4])
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 0.02}  # of the logits' standard deviation
_IN_16_BITS = 0.35
_ATTEMPTS = 3
_OPERATIONS = {"cpu": 1e11, "cuda": 1e14}  # the most that the image test may take, by device


def check(loaded: LoadedModel, plain: Callable[[], Any] | None = None) -> LoadedModel:
    """Return the model if its logits are those of plain transformers; else raise `IncompatibleModels`.

    plain: gives transformers' model. In 16 bits it may choose other experts where scores nearly tie, so that models
    with experts are asked again, with other tokens, up to `_ATTEMPTS` times.

    Raises `NumericsError` for NaN and infinity.
    """
    image = loaded.image_reference
    length = max(_PREFIX + len(_PARENTS), 0 if image is None else len(image.token_ids) + 1)
    try:
        check_tree(ModelRunner(loaded, 1, length))
    except IncompatibleModels:
        has_experts = num_experts_of(loaded.model.config.get_text_config()) > 1
        if plain is None or tolerance(loaded) < _IN_16_BITS or not has_experts:
            raise
        loaded = _checked_again(loaded, plain())
    check_image(ModelRunner(loaded, 1, length))
    return loaded


def _checked_again(loaded: LoadedModel, model: "PreTrainedModel") -> LoadedModel:
    from ..hf.halves import text_half  # with transformers' modelling code

    model = text_half(model) if is_vlm(model.config) else model
    for attempt in range(1, _ATTEMPTS):
        loaded = replace(loaded, reference=plain_reference(model, attempt), attempt=attempt)
        try:
            check_tree(ModelRunner(loaded, 1, _PREFIX + len(_PARENTS)))
            break
        except IncompatibleModels:
            if attempt + 1 == _ATTEMPTS:
                raise
    return loaded


def tolerance(loaded: LoadedModel) -> float:
    """The largest difference of logits, in standard deviations. Layers that round their inputs count as 16-bit ones."""
    layers = [module for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]
    rounds = any(getattr(layer, "input_bits", 8) == 8 for layer in layers)
    return _IN_16_BITS if rounds else _TOLERANCE.get(loaded.dtype, _IN_16_BITS)


def _tokens(model: "PreTrainedModel", attempt: int) -> list[int]:
    """Made-up tokens: the prefix, then one for each node of the tree."""
    vocab_size, count = int(model.get_input_embeddings().num_embeddings), _PREFIX + len(_PARENTS)  # type: ignore[union-attr, arg-type]
    return [(7919 * i + 13) % vocab_size for i in range(1 + attempt * count, 1 + (1 + attempt) * count)]


def _path_texts(model: "PreTrainedModel", attempt: int) -> list[list[int]]:
    """The prefix, root and path of each of `_PATHS`."""
    tokens = _tokens(model, attempt)
    return [tokens[: _PREFIX + 1] + [tokens[_PREFIX + node] for node in path] for path in _PATHS]


@torch.inference_mode()
def plain_reference(model: "PreTrainedModel", attempt: int = 0) -> list[Tensor]:
    """Logits [V] after each of `_PATHS`, by plain transformers: without a cache, or token by token by recurrent layers,
    some of which compute texts a little differently."""
    texts = torch.tensor(_path_texts(model, attempt), device=model.device)  # type: ignore[arg-type]
    if not is_recurrent(model):
        return [*model(texts, use_cache=False).logits[:, -1].float()]
    held, logits = dict[str, Any](), texts.new_empty(0)
    for column in range(texts.shape[1]):
        where = torch.full_like(texts[:, :1], column)
        out = model(texts[:, column : column + 1], position_ids=where, use_cache=True, **held)
        held, logits = {KV_CACHE: out[KV_CACHE]}, out.logits
    return [*logits[:, -1].float()]


def own_reference(loaded: LoadedModel) -> list[Tensor]:
    """Logits [V] after each of `_PATHS` read as plain text, for a model that plain transformers cannot run."""
    return [reference_logits(loaded, ids)[-1].float() for ids in _path_texts(loaded.model, loaded.attempt)]


def check_tree(runner: ModelRunner) -> None:
    """Raise `IncompatibleModels` if a branching pass does not give the logits of plain transformers."""
    loaded, tokens = runner.loaded, _tokens(runner.loaded.model, runner.loaded.attempt)
    if runner.max_length < len(tokens):
        return
    slot = runner.cache.allocate()
    try:
        unlike = refused(f"{loaded.name} cannot be run with a cache of trees", kind=IncompatibleModels)
        with nullcontext() if loaded.attends_trees else unlike:
            runner.extend_cache(slot, tokens[:_PREFIX])
            logits = runner.forward([slot], TokenTree.from_lists([tokens[_PREFIX:]], [_PARENTS], loaded.device))[0]
    finally:
        runner.cache.release(slot)
    for path, expected in zip(_PATHS, loaded.reference, strict=True):
        if not expected.isfinite().all():
            raise NumericsError(
                f"{loaded.name} gives NaN or infinite logits",
                expected="finite numbers",
                fix="load it in another dtype (dtype='float32' or 'bfloat16'), or fetch the weights again",
            )
        _compare(
            loaded, logits[path[-1]], expected, "does not give the same logits for a tree as for its paths",
            "this architecture cannot be decoded in trees; decode it with plain transformers",
        )  # fmt: skip


def learned(vision: Vision) -> Vision:
    """The vision half of a generic family with what its model does with made-up images; others as they are.

    Raises `ConfigError` where there is a processor that cannot read them, `IncompatibleModels` as `Vision.enter`.
    """
    if not vision.family.is_generic or vision.processor is None:
        return vision
    entrance = vision.enter(model_inputs(_made_up(vision)[0]))
    vision = replace(vision, placeholder_ids=vision.placeholder_ids | entrance.placeholder_ids)
    offset = 0 if vision.family.axes else int(entrance.position_ids[0, 0])
    blocks = ("windowed" if entrance.windowed_blocks else "image") if entrance.blocks else None
    extras = frozenset(entrance.extras)
    return replace(vision, family=replace(vision.family, blocks=blocks, text_offset=offset, extras=extras))


def _made_up(vision: Vision) -> tuple[Mapping[str, Any], list[int], VisionPrompt]:
    """The processor's inputs of a chat with a made-up image, or with several where the family is not known."""
    images = [Image.linear_gradient("L").resize((48, 32)).convert("RGB")]
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    if vision.family.is_generic:
        images, parts = [*images, images[0].rotate(90, expand=True)], parts * 2
    inputs = process_chat(vision, [{"role": "user", "content": parts}], images)
    return inputs, *prompt_of(vision, inputs, images)


@torch.inference_mode()
def plain_image_reference(model: "PreTrainedModel", vision: Vision) -> ImageReference | None:
    """Run the whole model before its halves are separated. None if there is no processor, or if that is expensive and
    the family is known."""
    from ..hf.halves import language_model  # with transformers' modelling code

    if vision.processor is None:
        return None
    try:
        inputs, ids, prompt = _made_up(vision)
    except ConfigError:  # there is no chat template for images
        return None
    weights = sum(p.numel() for p in language_model(model).parameters())
    if not vision.family.is_generic and 2 * weights * len(ids) > _OPERATIONS.get(model.device.type, 0.0):
        return None
    arguments = on_device(model_inputs(inputs), next(model.parameters()))
    return ImageReference(ids, prompt, model(**arguments, use_cache=False).logits[0, -1].float())


def check_image(runner: ModelRunner) -> None:
    """Raise `IncompatibleModels` if the runner's logits after the image are not those of plain transformers."""
    loaded, expected = runner.loaded, runner.loaded.image_reference
    if expected is None or len(expected.token_ids) >= runner.max_length:
        return
    slot = runner.admit(expected.token_ids, expected.prompt)
    try:
        runner.prefill(slot, expected.token_ids, expected.prompt)
        root = TokenTree.chain([[expected.token_ids[-1]]], loaded.device)
        logits = runner.forward([slot], root)[0, 0]
    finally:
        runner.cache.release(slot)
        runner.images.features.clear()
        runner.prefixes.clear()
    _compare(
        loaded, logits, expected.logits, "does not give the logits of plain transformers after an image",
        "this model cannot be decoded here; decode it with plain transformers",
    )  # fmt: skip


def _compare(loaded: LoadedModel, logits: Tensor, expected: Tensor, message: str, fix: str) -> None:
    apart, most = logits.float() - expected, tolerance(loaded)
    apart -= apart.mean()  # a constant changes no probability; Gemma's logits in bfloat16 differ by one
    error = apart.abs().max() / expected.std().clamp(min=1e-6)
    if not error <= most:  # a NaN fails too
        raise IncompatibleModels(
            f"{loaded.name} {message}",
            got=f"a difference of {float(error):.3g} standard deviations",
            expected=f"at most {most}",
            fix=fix,
        )
