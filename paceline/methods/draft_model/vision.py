"""How a draft model handles the images of a prompt: not at all, with its own tower, or with the target's features.

    target    text  <i> <i> <i> <i>  text           <i>: placeholders, with features of the target
    none      text  text                            they are dropped; positions are those of the shorter text
    own       text  <i> <i>  text                   the draft's own processor and tower make other features, or fewer
    shared    text  <i> <i> <i> <i>  text           the target's features, or its tower's with another projector
    pooled    text  <i>  text                       one for each image: the mean of the target's features

The answer is the target's in any case; only the acceptance depends on the choice.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast, final

import torch

from ...core.interfaces import Target
from ...core.request import TokenSequence
from ...core.vision import PromptImage, VisionPrompt
from ...errors import ConfigError, IncompatibleModels, PacelineError
from ...hf.image_prompts import read_chat, text_prompt, with_positions
from ...hf.vision import BoundedCache, Family, Features, Vision
from ...target.loaded import LoadedModel
from .chain import Runner

_log = logging.getLogger(__name__)
VisionMode: TypeAlias = Literal["own", "shared", "pooled", "none"]
_Own: TypeAlias = tuple[list[int], PromptImage]
"""The draft's tokens for an image, and the image with its places in them."""

_LOOK = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "."}]}]
_CACHE_BYTES = 256 << 20  # of processed images


@dataclass(frozen=True, eq=False)
class DraftPrompt:
    """The draft's version of the prompt, which replaces the first `replaced` tokens of the text."""

    replaced: int
    prompt: list[int]
    vision: VisionPrompt | None

    def text(self, token_ids: list[int]) -> list[int]:
        return self.prompt + token_ids[self.replaced :]


class DraftVision(ABC):
    """Makes the prompts of one draft model. loaded: the draft as it will run."""

    def __init__(self, target: Target, loaded: LoadedModel):
        self.target, self.loaded = target, loaded

    @abstractmethod
    def read(self, seq: TokenSequence, draft: Runner) -> DraftPrompt:
        """The prompt of a sequence for `draft`, the runner of `loaded`."""

    def text_only(self, ids: list[int], replaced: int) -> DraftPrompt:
        half = self.loaded.vision
        return DraftPrompt(replaced, ids, None if half is None else text_prompt(half, len(ids)))


@final
class TextOnly(DraftVision):
    """Drops placeholders from the prompt; its last token is always kept."""

    def read(self, seq: TokenSequence, draft: Runner) -> DraftPrompt:
        *before, last = seq.prompt_ids
        kept = [token for token in before if token not in self.target.banned_token_ids]
        return self.text_only([*kept, last], len(seq.prompt_ids))


@final
class OwnTower(DraftVision):
    """Processes every image again from its source, with the draft's own processor.

    Where that fails, the draft reads the text alone.
    """

    def __init__(self, target: Target, loaded: LoadedModel):
        super().__init__(target, loaded)
        if loaded.vision is None:
            raise IncompatibleModels(
                f"the draft {loaded.name} has no vision tower",
                got='vision="own"',
                fix='use vision="none" to draft without images, or draft with a vision-language model',
            )
        if loaded.vision.family.is_generic:
            raise IncompatibleModels(
                f"the draft {loaded.name} reads all images of a prompt together", got='vision="own"',
                expected="a family that encodes them one by one", fix='use vision="none"',
            )  # fmt: skip
        if loaded.vision.processor is None:
            raise ConfigError(f"the draft {loaded.name} has no processor", fix="load it from its folder, or pass one")
        target.keep_images()
        self._half: Vision = loaded.vision
        self._seen: BoundedCache[str, _Own] = BoundedCache(
            _CACHE_BYTES, lambda entry: sum(t.nbytes for t in entry[1].inputs.values())
        )

    def read(self, seq: TokenSequence, draft: Runner) -> DraftPrompt:
        if seq.vision is None or not seq.vision.images:
            return self.text_only(seq.prompt_ids, len(seq.prompt_ids))
        try:
            return self._seeing(seq, seq.vision.images)
        except PacelineError as error:
            _log.warning("the draft %s reads a prompt without its images: %s", self.loaded.name, error)
            return TextOnly(self.target, self.loaded).read(seq, draft)

    def _seeing(self, seq: TokenSequence, prompt_images: Sequence[PromptImage]) -> DraftPrompt:
        ids, images, end = list[int](), list[PromptImage](), 0
        for image in prompt_images:
            ids += seq.prompt_ids[end : image.start]
            span, draft_image = self._processed(image)
            images.append(replace(draft_image, places=tuple(len(ids) + place for place in draft_image.places)))
            ids += span
            end = image.stop
        ids += seq.prompt_ids[end:]
        return DraftPrompt(len(seq.prompt_ids), ids, self._prompt(ids, images))

    def _processed(self, image: PromptImage) -> _Own:
        """Tokens from its first placeholder to its last, and the image with its places counted from the first."""
        entry = self._seen.get(image.key)
        if entry is None:
            if image.source is None:
                raise ConfigError("a draft with its own vision tower needs the images", got="tensors alone")
            ids, prompt = read_chat(self._half, _LOOK, [image.source])  # type: ignore[list-item]
            assert prompt is not None
            (draft_image,) = prompt.images
            places = tuple(place - draft_image.start for place in draft_image.places)
            span = ids[draft_image.start : draft_image.stop]
            entry = span, replace(draft_image, places=places, source=None)  # pixels by the tensors alone
            self._seen.put(image.key, entry)
        return entry

    def _prompt(self, ids: list[int], images: list[PromptImage]) -> VisionPrompt:
        """Positions and blocks by the draft's own rules."""
        token_ids, inputs = torch.tensor([ids]), dict[str, torch.Tensor]()
        if self._half.family.axes:
            inputs["image_grid_thw"] = torch.cat([image.inputs["image_grid_thw"] for image in images])
            inputs["mm_token_type_ids"] = (token_ids == self._half.image_token).long()
        return with_positions(self._half, tuple(images), token_ids, inputs)


@final
class SharedTower(DraftVision):
    """The target encodes each image, once for both.

    If both models have the same hidden size, the draft gets the target's projected features; else the output of the
    target's tower goes through the draft's own projector. Raises `IncompatibleModels` if neither is possible.
    """

    def __init__(self, target: Target, loaded: LoadedModel):
        target_vision = target.loaded.vision
        if target_vision is None:
            raise IncompatibleModels("the target has no vision tower to share", got=target.loaded.name)
        draft_vision = loaded.vision
        self._projected = loaded.hidden_size == target.loaded.hidden_size
        same_family = draft_vision is not None and draft_vision.family == target_vision.family
        if target_vision.family.needs_transformers:
            message, got = "the target's features are not all that its text model gets of an image", target.loaded.name
            raise IncompatibleModels(message, got=got, fix='vision="none"')
        if target_vision.family.axes and not same_family:
            raise IncompatibleModels(
                "the target's positions have several axes, which the draft does not support",
                got=loaded.name,
                expected="a draft of the same family",
                fix='vision="none"',
            )
        self._takes_deepstack = same_family
        if self._projected:
            processor = (draft_vision or target_vision).processor
            half = replace(target_vision, processor=processor)
        elif draft_vision is not None:
            half = target.share_vision_tower(draft_vision)
        else:
            raise IncompatibleModels(
                f"{loaded.name} has no projector for the target's vision tower",
                got=f"hidden size {loaded.hidden_size}",
                expected=f"{target.loaded.hidden_size}, the target's, or a vision-language model with the same tower",
                fix='vision="none"',
            )
        super().__init__(target, replace(cast("Any", loaded), vision=half, image_reference=None))

    def read(self, seq: TokenSequence, draft: Runner) -> DraftPrompt:
        if seq.vision is None or not seq.vision.images:
            return self.text_only(seq.prompt_ids, len(seq.prompt_ids))
        if self._projected:
            features = self.target.image_features(seq.vision.images)
            for image, seen in zip(seq.vision.images, features, strict=True):
                draft.images.features.put(image.key, seen if self._takes_deepstack else Features(seen.rows))
        return DraftPrompt(len(seq.prompt_ids), seq.prompt_ids, seq.vision)


@final
class Pooled(DraftVision):
    """The draft reads one embedding for each image, the mean of the target's features.

    Raises `IncompatibleModels` unless both models have the same hidden size.
    """

    def __init__(self, target: Target, loaded: LoadedModel):
        half = target.loaded.vision
        if half is None:
            raise IncompatibleModels("the target has no vision tower to share", got=target.loaded.name)
        if loaded.hidden_size != target.loaded.hidden_size:
            raise IncompatibleModels(
                "the target's features do not fit the draft", got=f"hidden size {loaded.hidden_size}",
                expected=f"{target.loaded.hidden_size}, the target's", fix='vision="none"',
            )  # fmt: skip
        half = replace(half, family=Family(text_offset=half.family.text_offset))
        super().__init__(target, replace(cast("Any", loaded), vision=half, image_reference=None))

    def read(self, seq: TokenSequence, draft: Runner) -> DraftPrompt:
        if seq.vision is None or not seq.vision.images:
            return self.text_only(seq.prompt_ids, len(seq.prompt_ids))
        ids, images, end = list[int](), list[PromptImage](), 0
        for image, seen in zip(seq.vision.images, self.target.image_features(seq.vision.images), strict=True):
            ids += seq.prompt_ids[end : image.start + 1]
            images.append(replace(image, key=f"{image.key} pooled", places=(len(ids) - 1,), source=None))
            draft.images.features.put(images[-1].key, Features(seen.rows.mean(0, keepdim=True)))
            end = image.stop
        ids += seq.prompt_ids[end:]
        prompt = VisionPrompt(tuple(images), None, self.loaded.offset_of(None))
        return DraftPrompt(len(seq.prompt_ids), ids, prompt)


def vision_of_draft(mode: VisionMode | None, target: Target, loaded: LoadedModel) -> DraftVision:
    """The `DraftVision` of a mode; None means "own" if both models have vision and the draft can, else "none"."""
    if mode is None:
        sees = loaded.vision is not None and not loaded.vision.family.is_generic and target.loaded.vision is not None
        mode = "own" if sees else "none"
    classes: dict[VisionMode, type[DraftVision]] = {
        "own": OwnTower,
        "shared": SharedTower,
        "pooled": Pooled,
        "none": TextOnly,
    }
    return classes[mode](target, loaded)
