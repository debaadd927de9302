"""From a chat with images to token ids and a `VisionPrompt`, by the model's own processor.

The processor's tensors are divided, so that an image has the same ones, and the same hash, whatever it comes with.
"""

import copy
import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.vision import PromptImage, VisionPrompt
from ..errors import ConfigError, IncompatibleModels
from ..schema import brief, check_text
from .chats import Message
from .checkpoint import refused
from .vision import Vision, num_bytes, runs

_LOG = logging.getLogger("paceline")
_DRAFT_SIDE = 2048  # pixels; drafts alone see larger images reduced
_NOT_FOR_THE_MODEL = ("text_replacement_offsets", "labels", "return_metadata")
_GENERAL = ("add_generation_prompt", "continue_final_message")
"""Options that transformers itself heeds."""


def read_chat(
    vision: Vision,
    messages: Sequence[Message],
    images: Sequence[Image.Image],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[int], VisionPrompt | None]:
    """Token ids of a chat whose contents are lists of parts, and the images as a `VisionPrompt`; None without images.

    images: the images of the parts of type "image", in their order. options: of the chat template. Raises `ConfigError`
    where the processor fails.
    """
    inputs = process_chat(vision, messages, images, options)
    return prompt_of(vision, inputs, images) if images else (list(inputs["input_ids"]), None)


def read_text(vision: Vision, text: str, images: Sequence[Image.Image]) -> tuple[list[int], VisionPrompt]:
    """As `read_chat`, of a text that has the processor's placeholder for each image."""
    processor = _processor(vision)
    fix = f"write {getattr(processor, 'image_token', 'its placeholder')} into the text, once for each image"
    return prompt_of(vision, _processed(vision, text, images, fix), images)


def process_chat(
    vision: Vision,
    messages: Sequence[Message],
    images: Sequence[Image.Image],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """What the processor makes of a chat: tensors of a batch of one where it has images, else a list of ids."""
    processor = _processor(vision)
    rendered = _render(processor, messages, options)
    return _processed(vision, rendered, images, "images must be of the size and number that this model takes")


def _processor(vision: Vision) -> Any:
    if vision.processor is None:
        raise ConfigError("this vision-language model has no processor", fix="pass processor=..., or token ids")
    return vision.processor


def _processed(vision: Vision, rendered: str, images: Sequence[Image.Image], fix: str) -> Mapping[str, Any]:
    """What the processor makes of a text and its images."""
    processor = _processor(vision)
    with vision.tokenizing:
        special = {"add_special_tokens": False} if begins_with_bos(processor.tokenizer, rendered) else {}
    if not images:
        return processor.tokenizer(rendered, **special)
    options = {"return_text_replacement_offsets": True, "return_tensors": "pt", **special}
    with refused("the processor cannot read this prompt", fix=fix):
        beside = copy.copy(processor)
        beside.tokenizer = _Locked(processor.tokenizer, vision.tokenizing)
        return beside(text=[rendered], images=[list(images)], **options)


class _Locked:
    """A tokenizer that holds a lock while it runs, so that others need not wait for the pixels of the same call."""

    def __init__(self, tokenizer: Any, lock: threading.RLock):
        self._tokenizer, self._lock = tokenizer, lock

    def __call__(self, *texts: Any, **options: Any) -> Any:
        with self._lock:
            return self._tokenizer(*texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def text_prompt(vision: Vision, length: int) -> VisionPrompt | None:
    """The `VisionPrompt` of a text: None, except for families whose prompts see in both directions."""
    if vision.family.blocks != "prompt":
        return None
    return VisionPrompt((), None, vision.family.text_offset, ((0, length),), True)


def render(template_of: Any, messages: Sequence[Message], options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The chat as one string, by the template of a tokenizer or processor. Raises `ConfigError` with its words.

    options: of `apply_chat_template`; those that a template reads by name must be in it.
    """
    template = str(options.get("chat_template") or template_of.chat_template)
    for name in options:
        if name not in (*_GENERAL, "chat_template") and name not in template:
            raise ConfigError(f"the model's chat template does not read {brief(name)}", fix="leave it out")
    fix = "use the roles, in the order, that this model's template takes; or give the whole prompt as a string"
    with refused("the model's chat template refuses this chat", fix=fix):
        options = {"add_generation_prompt": True, **options}
        rendered = template_of.apply_chat_template(list(messages), tokenize=False, **options)
    return writable(rendered)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that is a whole prompt, as the tokenizer begins and ends it; see `begins_with_bos`.

    Raises `ConfigError` for a text that cannot be written.
    """
    is_begun = begins_with_bos(tokenizer, writable(text))
    if is_begun and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        _tell(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=not is_begun))


def begins_with_bos(tokenizer: Any, text: str) -> bool:
    """Whether a prompt has its BOS token already: the tokenizer then adds no special tokens, so that there is one."""
    bos = tokenizer.bos_token
    if not (bos and text.lstrip().startswith(bos)):
        return False
    return tokenizer.encode(text, add_special_tokens=False)[:1] == [tokenizer.bos_token_id]


@cache
def _tell(bos: str) -> None:
    _LOG.warning("A prompt begins with %s, which is put before prompts anyway: it is not put there twice.", bos)


def writable(text: str) -> str:
    """The text of a prompt. Raises `ConfigError` where no encoding can write it."""
    try:
        return check_text(text)
    except ValueError as error:
        raise ConfigError("a prompt holds half a character", got=brief(text), expected=error) from None


def _render(processor: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The chat as one string, by the processor's template; contents are texts where that takes no lists."""
    if not (processor.chat_template or getattr(processor.tokenizer, "chat_template", None)):
        for name in options:
            if name not in _GENERAL:
                raise ConfigError("this model has no chat template", got=f"option {brief(name)}", fix="leave it out")
        return _untemplated(processor, messages)
    if not _takes_parts(processor):
        if any(part["type"] == "image" for message in messages for part in message["content"]):  # type: ignore[attr-defined]
            fix = "set processor.chat_template to one that goes through the parts of a message"
            raise ConfigError("this model's chat template takes no images", fix=fix)
        messages = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]  # type: ignore[attr-defined]
    return render(processor, messages, options)


def _takes_parts(processor: Any) -> bool:
    """Whether the template reads contents that are lists of parts: found by trying, since one that does not may print
    the list, or leave it out."""
    probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
    try:
        rendered = processor.apply_chat_template(probe, add_generation_prompt=True, tokenize=False)
    except Exception:  # templates raise what they like
        return False
    return "probe" in rendered and "'type'" not in rendered


def _untemplated(processor: Any, messages: Sequence[Message]) -> str:
    """A single message as PaliGemma was trained: images first, then the text."""
    if len(messages) != 1:
        raise ConfigError("this model has no chat template", got=f"{len(messages)} messages", expected="one message")
    parts: Any = messages[0]["content"]
    count = sum(part["type"] == "image" for part in parts)
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    if count and begins_with_bos(processor.tokenizer, text):  # the processor puts one behind the images
        bos = processor.tokenizer.bos_token
        _tell(bos)
        text = text.lstrip().removeprefix(bos)
    return writable(getattr(processor, "image_token", "") * count + text)


def prompt_of(
    vision: Vision, inputs: Mapping[str, Any], images: Sequence[Image.Image]
) -> tuple[list[int], VisionPrompt]:
    """Token ids and images, from what `process_chat` made of a chat with images."""
    token_ids: Tensor = inputs["input_ids"]
    ids = token_ids[0].tolist()
    name = vision.processor.tokenizer.convert_ids_to_tokens  # type: ignore[union-attr]
    places = [place for place, token in enumerate(ids) if token in vision.placeholder_ids]
    if "text_replacement_offsets" in inputs:
        offsets = inputs["text_replacement_offsets"][0]
        named = [token for token in map(name, vision.placeholder_ids) if token is not None]
        counts = [sum(map(offset["replacement"].count, named)) for offset in offsets]
    else:  # of a processor that does not tell, images must lie apart
        stretches = [(0, len(places))] if len(images) == 1 and places else runs(places)
        counts = [end - begin for begin, end in stretches]
    if len(counts) != len(images) or sum(counts) != len(places) or not all(counts):
        raise ConfigError(
            "images and placeholders of the prompt differ in number",
            got=f"{len(images)} images, {len(counts)} places for one, {len(places)} placeholders",
            fix="leave the model's special tokens out of the text",
        )
    if places[-1] == len(ids) - 1:
        raise ConfigError("the prompt ends with an image", fix="let a text follow it")
    prompt_images, first = list[PromptImage](), 0
    divided = _divided(vision, inputs, counts, places[-1] + 1)
    keys = _keys(divided[0], len(divided)) if vision.family.is_generic else map(_key, divided)
    for key, tensors, count, source in zip(keys, divided, counts, images, strict=True):
        prompt_images.append(PromptImage(key, tuple(places[first : first + count]), tensors, _reduced(source)))
        first += count
    return ids, with_positions(vision, tuple(prompt_images), token_ids, inputs)


def pixel_bytes(prompt: VisionPrompt) -> int:
    """Bytes that the images of a prompt hold: tensors of the processor, and opened images of 4 bytes a pixel."""
    sources = (image.source for image in prompt.images)
    opened = sum(4 * source.width * source.height for source in sources if isinstance(source, Image.Image))
    return opened + num_bytes([dict(image.inputs) for image in prompt.images])


def _reduced(image: Image.Image) -> Image.Image:
    """A copy of moderate size for a draft model, whose reading changes no answer; small images as they are."""
    factor = -(-max(image.size) // _DRAFT_SIDE)
    return image if factor == 1 else image.reduce(factor)


def model_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the processor made for the model."""
    return {name: value for name, value in inputs.items() if name not in _NOT_FOR_THE_MODEL}


def _divided(vision: Vision, inputs: Mapping[str, Any], counts: list[int], edge: int) -> list[dict[str, Tensor]]:
    if vision.family.is_generic:  # up to the token behind the last image, whose position tells those of the text
        length = inputs["input_ids"].shape[1]
        whole = {
            name: value[:, : edge + 1] if isinstance(value, Tensor) and value.shape[:2] == (1, length) else value
            for name, value in model_inputs(inputs).items()
        }
        return [whole] * len(counts)
    pixels: Tensor = inputs["pixel_values"]
    if vision.family.pixels == "grid":
        grid: Tensor = inputs["image_grid_thw"]
        rows = pixels.split(grid.prod(-1).tolist())
        return [{"pixel_values": part, "image_grid_thw": grid[i : i + 1]} for i, part in enumerate(rows)]
    if vision.family.pixels == "anyres":
        # One image is cut into tiles; of several LLaVA-OneVision takes each whole, and asks how many there are.
        many = {"batch_num_images": torch.tensor([min(len(counts), 2)])} if "batch_num_images" in inputs else {}
        sizes: Tensor = inputs["image_sizes"]
        each = range(len(counts))
        return [{"pixel_values": pixels[i : i + 1], "image_sizes": sizes[i : i + 1], **many} for i in each]
    dim = 1 if vision.family.pixels == "tiles" else 0
    total, share = pixels.shape[dim], sum(counts) // pixels.shape[dim]
    if share * total != sum(counts) or any(count % share for count in counts):
        raise IncompatibleModels("the processor's tiles differ in placeholders", got=f"{counts} for {total} tiles")
    names = [name for name in ("pixel_values", "pixel_attention_mask") if name in inputs]
    parts = {name: inputs[name].split([count // share for count in counts], dim) for name in names}
    return [{name: parts[name][i] for name in names} for i in range(len(counts))]


def _keys(inputs: Mapping[str, Any], count: int) -> list[str]:
    """The keys of all images of a prompt: the token behind the last one changes nothing before it."""
    key = _key({**inputs, "input_ids": inputs["input_ids"][:, :-1]})
    return [f"{key} {index}" for index in range(count)]


def _key(tensors: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        for leaf in tree_leaves(tensors[name]):
            if not isinstance(leaf, Tensor):
                digest.update(f"{name}{leaf!r}".encode())
                continue
            digest.update(f"{name}{tuple(leaf.shape)}{leaf.dtype}".encode())
            digest.update(leaf.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def with_positions(
    vision: Vision, images: tuple[PromptImage, ...], token_ids: Tensor, inputs: Mapping[str, Any]
) -> VisionPrompt:
    """The `VisionPrompt` of token ids [1, P] with the placeholders of these images; inputs: the processor's, of all."""
    family, length = vision.family, token_ids.shape[1]
    if family.axes:
        positions = vision.axes(token_ids, inputs)[:, 0]  # [A, P]
        delta = int(positions[0, -1]) - (length - 1)
        apart = (positions != torch.arange(length) + delta).any(0).nonzero()
        prompt = VisionPrompt(images, positions, delta, closing=int(apart.max()) + 1 if len(apart) else 0)
        if prompt.edge == length:
            raise IncompatibleModels("positions behind the last image do not count on with the text")
        return prompt
    if (text := text_prompt(vision, length)) is not None:
        return replace(text, images=images)
    blocks = tuple(runs([place for image in images for place in image.places])) if family.blocks else ()
    return VisionPrompt(images, None, family.text_offset, blocks, windowed_blocks=family.blocks == "windowed")
