"""What is known of the insides of transformers' vision-language models: their two halves, and how each family sees.

    chat ── processor ── token ids, pixels ── `hf_pictures` ── VisionPrompt
    VisionPrompt ── tower and projector ── features ── in the place of the placeholders' embeddings ── text half

The text half is a causal language model like any other, over the tensors of the whole.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from ..core.vision import PromptImage
from ..errors import IncompatibleModels
from .layout import PromptRows
from .text_half import TextHalf


@dataclass(frozen=True)
class Family:
    """How the models of a family see.

    pixels: how the processor's tensors divide into images: "rows" of pixel_values, "tiles" along its second dimension,
    "anyres" (a row of tiles and a size each), "grid" (patches counted by image_grid_thw). blocks: what sees itself in
    both directions: each "image", or the whole "prompt". text_offset: position of the first token of any text. axes:
    positions are the model's own `get_rope_index`.
    """

    pixels: Literal["rows", "tiles", "anyres", "grid"] = "rows"
    blocks: Literal["image", "prompt"] | None = None
    text_offset: int = 0
    axes: bool = False


FAMILIES: Mapping[str, Family] = {
    "llava": Family(),
    "llava_next": Family("anyres"),
    "llava_onevision": Family("anyres"),
    "qwen2_vl": Family("grid", axes=True),
    "qwen2_5_vl": Family("grid", axes=True),
    "qwen3_vl": Family("grid", axes=True),
    "smolvlm": Family("tiles"),
    "idefics3": Family("tiles"),
    "internvl": Family(),
    "gemma3": Family(blocks="image"),
    "paligemma": Family(blocks="prompt", text_offset=1),
}


@dataclass(frozen=True, eq=False)
class Features:
    """What the tower made of one image: a row for each placeholder, [M, E]; deep: for the first layers, [M, E] each."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for t in (self.rows, *self.deep))


@final
@dataclass(frozen=True, eq=False)
class Vision:
    """The vision half of a model.

    processor: None where the caller gave none; pictures are then refused. tower: the model without its language model.
    image_token: the placeholder that features replace. placeholder_ids: ids that stand for pictures, or would for
    videos; never drafted.
    """

    family: Family
    processor: ProcessorMixin | None
    tower: Any
    image_token: int
    placeholder_ids: frozenset[int]

    @torch.inference_mode()
    def features(self, image: PromptImage) -> Features:
        """Run the tower and the projector on one image. Raises `IncompatibleModels` where placeholders go empty."""
        like = next(self.tower.parameters())
        inputs = {
            name: tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in image.inputs.items()
        }
        out = self.tower.get_image_features(**inputs)
        rows = _joined(out.pooler_output)
        if len(rows) != image.num_tokens:
            raise IncompatibleModels(
                "the vision tower and the processor disagree about an image",
                got=f"{len(rows)} features",
                expected=f"{image.num_tokens}, one for each placeholder",
                fix="load the processor of this very model",
            )
        return Features(rows, tuple(_joined(part) for part in getattr(out, "deepstack_features", None) or ()))

    def axes(self, token_ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Positions of a prompt [1, P] on each axis, [A, 1, P], by the model's own rule."""
        wanted = ("image_grid_thw", "mm_token_type_ids", "attention_mask")
        given = {name: inputs[name] for name in wanted if name in inputs}
        return self.tower.get_rope_index(token_ids, **given)[0]


def _joined(features: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """[M, E] of the tiles of an image, which a family gives as one tensor or as several."""
    parts = list(features) if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def is_vlm(config: Any) -> bool:
    """Whether these are the facts of a model that reads pictures."""
    return hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def family_of(config: Any) -> Family:
    """How it sees. Raises `IncompatibleModels` for a family that was never held against plain transformers."""
    kind, tower = config.model_type, getattr(config.vision_config, "model_type", "")
    if kind not in FAMILIES or tower == "pixtral":
        raise IncompatibleModels(
            "this family of vision-language models is not supported",
            got=kind if kind not in FAMILIES else f"{kind} with a {tower} tower",
            expected=", ".join(FAMILIES),
            fix="decode it with plain transformers",
        )
    return FAMILIES[kind]


def text_half(model: PreTrainedModel) -> PreTrainedModel:
    """The language model and output head as a causal LM over the same modules.

    Where transformers has a causal class for the text config, it is that class, so that whatever works on such a model
    works on this half.
    """
    language, head = language_model(model), model.get_output_embeddings()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(language.config), None)
    if head is None:
        raise IncompatibleModels(
            "this vision-language model has no output head",
            got=type(model).__name__,
            fix="load the class that AutoModelForImageTextToText gives",
        )
    if kind is None:
        return TextHalf(language, head)
    with torch.device("meta"):  # a shell: every module with weights is replaced
        made: PreTrainedModel = kind(language.config)
    made.set_submodule(made.base_model_prefix, language)
    made.set_output_embeddings(head)
    if any(parameter.is_meta for parameter in made.parameters()):
        return TextHalf(language, head)
    return made.eval()


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder inside a vision-language model."""
    base = model.base_model
    return getattr(base, _language_name(base))


def _language_name(base: nn.Module) -> str:
    for name in ("language_model", "text_model"):
        if hasattr(base, name):
            return name
    raise IncompatibleModels(
        "no language model was found inside this model",
        got=type(base).__name__,
        expected="a module named language_model or text_model",
        fix="load the class that AutoModelForImageTextToText gives",
    )


def vision_half(model: PreTrainedModel, processor: ProcessorMixin | None) -> Vision:
    """Tower, projector and rules of a model; its language model is not held, so that quantising it frees it."""
    base, config = model.base_model, model.config
    name = _language_name(base)
    shared = {id(t): t for t in (*base.parameters(), *base.buffers())}
    tower = copy.deepcopy(base, {**shared, id(getattr(base, name)): nn.Module()})
    ids = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")}
    image = config.image_token_id
    placeholders = frozenset(i for i in ids if isinstance(i, int))
    return Vision(family_of(config), processor, tower.eval(), int(image), placeholders)


def deep_keywords(rows: PromptRows) -> dict[str, object]:
    """How a language model is told of features for its first layers; nothing where there are none."""
    if not rows.deep:
        return {}
    return {"visual_pos_masks": rows.is_image, "deepstack_visual_embeds": list(rows.deep)}
