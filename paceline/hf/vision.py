"""What is known of families of vision-language models, their vision half, and towers that two models share.

VisionPrompt ── tower and projector ── features, which replace the embeddings of placeholders ── text half
"""

import copy
import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ..core.vision import PromptImage
from ..errors import IncompatibleModels
from .checkpoint import refused
from .classes import ProcessorMixin
from .entrance import Entrance, enter

_NAME = "vision_tower"
_CACHE_BYTES = 256 << 20  # of the outputs of a shared tower


@dataclass(frozen=True)
class Family:
    """How the models of a family process images.

    pixels: how the processor's tensors are divided into images: "rows" of pixel_values, "tiles" along its second
        dimension, "anyres" (a row of tiles and a size for each), "grid" (patches counted by image_grid_thw), "prompt":
        they are not, and transformers' own forward reads the whole prompt, see `entrance`.
    blocks: the tokens that attend to one another in both directions: those of each "image", in all layers or in
        "windowed" ones, or the whole "prompt".
    text_offset: the position of the first token of any text.
    axes: whether positions have several axes, from the model's own `get_rope_index`.
    extras: further arguments of the text model, which only transformers' layers take.
    """

    pixels: Literal["rows", "tiles", "anyres", "grid", "prompt"] = "rows"
    blocks: Literal["image", "windowed", "prompt"] | None = None
    text_offset: int = 0
    axes: bool = False
    extras: frozenset[str] = frozenset()

    @property
    def is_generic(self) -> bool:
        """Whether nothing is known of the family but what its model does with a made-up image."""
        return self.pixels == "prompt"

    @property
    def needs_transformers(self) -> bool:
        """Whether only transformers' layers can read its prompts."""
        return bool(self.extras)


FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llava", "vipllava", "internvl", "aya_vision", "cohere2_vision", "deepseek_vl"), Family()),
    **dict.fromkeys(("exaone4_5", "lfm3_vl"), Family("grid")),
    **dict.fromkeys(("llava_next", "llava_onevision", "mistral3", "lighton_ocr"), Family("anyres")),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), Family("grid", axes=True)
    ),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl", "hunyuan_vl"), Family("grid", axes=True)
    ),
    **dict.fromkeys(("smolvlm", "idefics2", "idefics3"), Family("tiles")),
    "gemma3": Family(blocks="image"),
    "paligemma": Family(blocks="prompt", text_offset=1),
}
GENERIC = Family("prompt")


class Features(NamedTuple):
    """The features of an image from the tower: one for each placeholder [M, E], and those of DeepStack by layer.

    extras: of the whole prompt, see `Entrance`.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()
    extras: Mapping[str, Any] = {}


@final
@dataclass(frozen=True, eq=False)
class Vision:
    """The vision half of a model.

    processor: None where the caller gave none; images are then refused.
    tower: the model without its language model; of a generic family, what `stopping_copy` makes of the model.
    image_token: the placeholder that features replace.
    placeholder_ids: the ids of placeholders of images or videos. They are never drafted.
    tokenizing: held while the processor's tokenizer runs, which is not made for several threads.
    """

    family: Family
    processor: ProcessorMixin | None
    tower: Any
    image_token: int
    placeholder_ids: frozenset[int]
    tokenizing: threading.RLock = field(default_factory=threading.RLock)

    @torch.inference_mode()
    def features(self, image: PromptImage) -> Features:
        """Run tower and projector on one image. Raises `IncompatibleModels` unless each placeholder gets a feature."""
        like = next(self.tower.parameters())
        inputs = {
            name: tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in image.inputs.items()
        }
        out = self.tower.get_image_features(**inputs)
        rows = _joined(out.pooler_output)
        if len(rows) != image.num_tokens:
            raise IncompatibleModels(
                "the vision tower and the processor disagree about an image", got=f"{len(rows)} features",
                expected=f"{image.num_tokens}, one for each placeholder", fix="load the processor of this very model",
            )  # fmt: skip
        return Features(rows, tuple(_joined(part) for part in getattr(out, "deepstack_features", None) or ()))

    def encode(self, images: Sequence[PromptImage]) -> list[Features]:
        """The features of images of one prompt."""
        if not self.family.is_generic or not images:
            return [self.features(image) for image in images]
        inputs = images[0].inputs
        entrance, places = self.enter(inputs), inputs["input_ids"][0] == self.image_token
        self._check(entrance, inputs, places)
        rank = places.cumsum(0) - 1
        every = Features(entrance.embeds, entrance.deepstack, entrance.extras)
        return [
            every._replace(
                rows=every.rows[list(image.places)],
                deepstack=tuple(part[rank[list(image.places)]] for part in every.deepstack),
            )
            for image in images
        ]

    def enter(self, inputs: Mapping[str, Any]) -> Entrance:
        """What the text model of a generic family is given for the processor's inputs of one prompt."""
        with refused("transformers cannot read this prompt with its images", kind=IncompatibleModels):
            return enter(self.tower, inputs, self.image_token)

    def _check(self, entrance: Entrance, inputs: Mapping[str, Any], places: Tensor) -> None:
        """Raise `IncompatibleModels` where a prompt is not read as the made-up image was."""
        family, length = self.family, len(places)
        positions = torch.arange(length)[None] + family.text_offset
        if family.axes:
            positions = self.axes(inputs["input_ids"], inputs)[:, 0].cpu()
        given = entrance.position_ids[-len(positions) :] if family.axes else entrance.position_ids
        blocks = tuple(runs(places.nonzero().flatten().tolist())) if family.blocks else ()
        found = {
            "positions": torch.equal(given, positions.expand_as(given)),
            "sight in both directions": entrance.blocks == blocks
            and entrance.windowed_blocks == (bool(blocks) and family.blocks == "windowed"),
            "arguments": entrance.extras.keys() <= family.extras,
            "placeholders": entrance.placeholder_ids <= self.placeholder_ids,
        }
        if wrong := [name for name, holds in found.items() if not holds]:
            raise IncompatibleModels(
                "transformers reads this prompt by another rule than a made-up image", got=f"other {wrong[0]}",
                fix="ask with fewer images, or decode it with plain transformers",
            )  # fmt: skip

    def axes(self, token_ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Positions of a prompt [1, P] on each axis, [A, 1, P], by the model's own rule."""
        rule = self.tower.base_model.get_rope_index
        wanted = inspect.signature(rule).parameters.keys() - {"input_ids"}
        return rule(token_ids, **{name: inputs[name] for name in wanted if name in inputs})[0]


def _joined(features: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """The features of an image's tiles, given as one tensor or several, as one tensor [M, E]."""
    parts = list(features) if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of placeholders without a text between them; two images side by side are one."""
    found = list[tuple[int, int]]()
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


def is_vlm(config: Any) -> bool:
    """Whether this is the configuration of a model that reads images."""
    return hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def family_of(config: Any) -> Family:
    """The family of a configuration; a generic one where there is no row for it."""
    family = FAMILIES.get(config.model_type, GENERIC)
    has_sizes = config.model_type == "llava" and getattr(config.vision_config, "model_type", "") == "pixtral"
    return FAMILIES["mistral3"] if has_sizes else family


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in tuples or in an output of transformers, each counted once."""
    return sum({id(leaf): leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """An LRU cache of at most `max_bytes`, measured by `size`; a larger value is not stored."""

    def __init__(self, max_bytes: int, size: Callable[[Value], int]):
        self.max_bytes, self.num_bytes, self._size = max_bytes, 0, size
        self._held: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Value | None:
        """The value of the key, which becomes the most recently used; None if it is not cached."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: Key, value: Value) -> None:
        """Store a value, replacing an older one of the same key."""
        self.drop(key)
        size = self._size(value)
        if size > self.max_bytes:
            return
        while self.num_bytes + size > self.max_bytes:
            self.drop(next(iter(self._held)))
        self._held[key] = value
        self.num_bytes += size

    def drop(self, key: Key) -> None:
        """Remove a value; harmless if it is not cached."""
        if key in self._held:
            self.num_bytes -= self._size(self._held.pop(key))

    def clear(self) -> None:
        self._held.clear()
        self.num_bytes = 0


@final
class SharedVisionTower(nn.Module):
    """A tower that two models use. It caches its outputs by the pixels of images."""

    def __init__(self, tower: nn.Module):
        super().__init__()
        self.tower = tower
        self.held: BoundedCache[str, Any] = BoundedCache(_CACHE_BYTES, num_bytes)

    def forward(self, pixel_values: Tensor, *others: object, **options: object) -> Any:
        """Run the tower or return its cached output. The arguments differ between families."""
        if any(isinstance(value, Tensor) for value in (*others, *options.values())):
            return self.tower(pixel_values, *others, **options)
        digest = hashlib.sha256(repr((tuple(pixel_values.shape), pixel_values.dtype, others, options)).encode())
        digest.update(pixel_values.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        features = self.held.get(key := digest.hexdigest())
        if features is None:
            features = self.tower(pixel_values, *others, **options)
            self.held.put(key, features)
        return features

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes, such as the dtype, to the tower."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("tower"), name)


def share_tower(owner: Vision, other: Vision) -> tuple[Vision, Vision]:
    """Copies of both vision halves that share the owner's tower.

    Raises `IncompatibleModels` unless the towers have the same form.
    """
    owned, ours = getattr(owner.tower, _NAME, None), getattr(other.tower, _NAME, None)
    if owned is None or ours is None:
        message, got = "the tower of this family cannot be shared", type(owner.tower).__name__
        raise IncompatibleModels(message, got=got, fix='vision="own"')
    forms = [_form(half.tower.config) for half in (owner, other)]
    if forms[0] != forms[1] or owner.family != other.family:
        wrong = sorted(key for key in forms[0] | forms[1] if forms[0].get(key) != forms[1].get(key))
        raise IncompatibleModels(
            "the draft's projector was made for another vision tower", got=", ".join(wrong) or "another family",
            expected="the same tower and the same layers of it", fix='vision="own"',
        )  # fmt: skip
    kinds = [(p.dtype, p.device) for p in (next(owned.parameters()), next(ours.parameters()))]
    if kinds[0] != kinds[1]:
        raise IncompatibleModels("a shared tower needs both models in one dtype on one device", got=f"{kinds}")
    shared = owned if isinstance(owned, SharedVisionTower) else SharedVisionTower(owned).eval()
    owners, others = copy.copy(owner.tower), copy.copy(other.tower)
    for tower in (owners, others):
        tower._modules = {**tower._modules, _NAME: shared}
    return replace(owner, tower=owners), replace(other, tower=others)


def _form(config: Any) -> dict[str, object]:
    """The settings of the tower that a projector depends on."""
    tower = config.vision_config.to_dict()
    drop = ("_name_or_path", "torch_dtype", "dtype", "transformers_version", "architectures")
    also = {key: getattr(config, key, None) for key in ("vision_feature_layer", "vision_feature_select_strategy")}
    return {**{key: value for key, value in tower.items() if key not in drop}, **also}
