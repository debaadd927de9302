"""From the prompt of a user (a string, a chat or token ids) to token ids and the images as the engine takes them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
from jinja2 import TemplateSyntaxError
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..core.vision import VisionPrompt
from ..errors import CacheFull, ConfigError
from ..hf.chats import Message, has_images, split_chat, text_chat
from ..hf.image_prompts import encode, read_chat, read_text, render, text_prompt, writable
from ..hf.images import LIMITS, ImageLimits, ImageSource, open_images
from ..schema import brief, cut, scalar
from .loaded import LoadedModel

Chat: TypeAlias = Sequence[Message]


@dataclass(frozen=True)
class TemplatedChat:
    """A chat with options of the chat template, as `apply_chat_template` of transformers takes them, and its limits."""

    messages: Chat
    options: Mapping[str, Any]
    limits: ImageLimits = LIMITS


@dataclass(frozen=True)
class ImageText:
    """A text with a placeholder for each of its images, as the model's processor takes both."""

    text: str
    images: Sequence[ImageSource]


Prompt: TypeAlias = (
    str | Chat | TemplatedChat | ImageText | Sequence[int] | Mapping[str, Any] | Tensor | NDArray[np.integer[Any]]
)
ReadPrompt: TypeAlias = tuple[list[int], VisionPrompt | None]
"""Token ids and images."""
_KINDS = "a text, a chat (a list of messages) or a list of token ids"
_KEYS = {
    "prompt": ("multi_modal_data",),
    "prompt_token_ids": (),
    "input_ids": ("attention_mask", "token_type_ids"),
}
"""The keys of vLLM's prompts and of tokenizers' results, with those that may come with them."""


def as_list(prompts: object) -> list[Prompt]:
    """One prompt or many as a list, see `as_prompt`; an array of two dimensions holds many. Raises `ConfigError`."""
    items = _taken(prompts)
    if isinstance(items, str | ImageText) or (_is_part(items[0]) if items else isinstance(prompts, Mapping)):
        return [as_prompt(items)]
    return [as_prompt(item) for item in items]


def as_chats(value: object) -> list[Chat]:
    """One chat or many as a list. Raises `ConfigError` for anything else."""
    chats: list[Any] = as_list(value)
    for chat in chats:
        if not (isinstance(chat, list) and chat and isinstance(chat[0], Mapping)):
            raise ConfigError("this is no chat", got=brief(chat), expected="a list of messages", fix="use generate")
    return chats


def as_prompt(value: object) -> Prompt:
    """One prompt as text, chat or list of token ids.

    It may also be an array of ids, what a tokenizer returns, or vLLM's {"prompt": ...} and {"prompt_token_ids": ...}.
    Raises `ConfigError` for anything else.
    """
    prompt = value if isinstance(value, TemplatedChat) else _taken(value)
    if isinstance(prompt, TemplatedChat | ImageText):
        return prompt
    if len(prompt) == 1 and not isinstance(value, list | tuple) and not isinstance(prompt, str):
        prompt = prompt[0] if isinstance(prompt[0], list) else prompt  # a batch of one
    return cast("Prompt", prompt)


def _taken(value: Any) -> str | ImageText | list[Any]:
    """What mappings and arrays hold."""
    if isinstance(value, ImageText):
        return value
    if isinstance(value, Mapping):
        return _held(cast("Mapping[str, Any]", value))
    if isinstance(value, bytes | bytearray | memoryview):
        raise ConfigError("this is no prompt", got=brief(value), expected=_KINDS, fix="decode the bytes")
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return list(cast("Sequence[Any]", value))
    raise ConfigError("this is no prompt", got=brief(value), expected=_KINDS)


def _held(mapping: Mapping[str, Any]) -> str | ImageText | list[Any]:
    """The prompts of a mapping: text, text with images, token ids, or lists of those."""
    if "role" in mapping:
        raise ConfigError("this is a message, and a chat is a list of them", got=brief(mapping), fix="write [{...}]")
    name = next((name for name in _KEYS if name in mapping), "")
    unknown = [str(key) for key in mapping if key not in (name, *_KEYS.get(name, ())) and mapping[key] is not None]
    if not name or unknown:
        raise ConfigError(
            "a prompt has keys that are not read" if name else "this is no prompt",
            got=cut(", ".join(unknown)) or brief(mapping),
            expected='{"prompt": ...}, also with "multi_modal_data", {"prompt_token_ids": ...}, '
            'or {"input_ids": ..., "attention_mask": ...}',
            fix='put images into a chat, {"type": "image", "image": ...}, or beside a text' if name else None,
        )
    ids = _taken(mapping[name])
    if images := _images(mapping.get("multi_modal_data")):
        if not isinstance(ids, str):
            raise ConfigError("images need a prompt of text", got=brief(ids), expected='{"prompt": "text", ...}')
        return ImageText(ids, images)
    return ids if mapping.get("attention_mask") is None else _unpadded(ids, _taken(mapping["attention_mask"]))


def _images(data: object) -> list[Any]:
    """The images of vLLM's multi_modal_data. Raises `ConfigError` for other kinds of data."""
    data = {} if data is None else data
    if not isinstance(data, Mapping) or {str(key) for key in data if data[key] is not None} - {"image"}:
        got = ", ".join(map(str, data)) if isinstance(data, Mapping) else brief(data)
        raise ConfigError("multi_modal_data holds what is not read", got=got, expected='{"image": one or a list}')
    images = data.get("image")
    return [] if images is None else list(images) if isinstance(images, list | tuple) else [images]


def _unpadded(ids: Any, mask: Any) -> list[Any]:
    """Token ids without the padding at either end. Raises `ConfigError` where the mask leaves out others."""
    if len(ids) != len(mask):
        raise ConfigError("input_ids and attention_mask differ in length", got=f"{len(ids)} and {len(mask)}")
    if mask and not isinstance(scalar(mask[0]), int | float):
        return [_unpadded(_taken(row), _taken(kept)) for row, kept in zip(ids, mask, strict=True)]
    places = [place for place, kept in enumerate(mask) if kept]
    begin, end = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) != end - begin:
        raise ConfigError("attention_mask leaves out tokens inside the prompt", expected="zeros at its ends alone")
    return list(ids[begin:end])


def _is_part(value: object) -> bool:
    """Whether it is a message of a chat, or a number: part of a prompt, and none itself."""
    if isinstance(value, Mapping):
        return not any(name in value for name in _KEYS)
    return isinstance(scalar(value), int | float)


def tokenizer_of(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises `ConfigError` where it has none."""
    if loaded.tokenizer is None:
        raise ConfigError("this model has no tokenizer", fix="pass tokenizer=..., or prompts as token ids")
    return loaded.tokenizer


def is_chat(prompt: object) -> TypeGuard[Chat]:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(cast("Sequence[object]", prompt)) > 0 and isinstance(prompt[0], Mapping)


def holds_images(value: object) -> bool:
    """Whether a prompt has an image. Raises `ConfigError` for what is no prompt."""
    prompt = as_prompt(value)
    if isinstance(prompt, ImageText):
        return True
    chat = prompt.messages if isinstance(prompt, TemplatedChat) else prompt
    return is_chat(chat) and has_images(chat)


def has_chat_template(loaded: LoadedModel) -> bool:
    """Whether the model was made for chats."""
    processor = None if loaded.vision is None else loaded.vision.processor
    return any(getattr(owner, "chat_template", None) for owner in (loaded.tokenizer, processor))


def set_chat_template(loaded: LoadedModel, template: str) -> None:
    """Render chats by this template from now on. Raises `ConfigError` for one that cannot be read."""
    tokenizer: Any = tokenizer_of(loaded)
    for owner in (tokenizer, None if loaded.vision is None else loaded.vision.processor):
        if owner is not None:
            owner.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError("the chat template cannot be read", got=f"line {error.lineno}: {error.message}") from None
    except Exception:  # of a template that refuses this chat
        return


def read_prompt(
    loaded: LoadedModel, value: object, max_length: int, check: Callable[[], None] = lambda: None
) -> ReadPrompt:
    """Token ids of a prompt as `as_prompt` takes it, and its images; a chat goes through the model's template.

    check: see `open_images`.

    Raises `ConfigError` for a prompt that is empty or cannot be read, `CacheFull` for one that fills the context.
    """
    vision, prompt = None, as_prompt(value)
    if isinstance(prompt, str):
        ids = encode(tokenizer_of(loaded), prompt)
    elif isinstance(prompt, TemplatedChat):
        ids, vision = _chat(loaded, prompt, check)
    elif isinstance(prompt, ImageText):
        if loaded.vision is None:
            raise ConfigError("this model takes text alone", got="a prompt with an image", fix="leave the image out")
        with open_images(prompt.images, LIMITS, check) as images:
            ids, vision = read_text(loaded.vision, writable(prompt.text), images)
    elif is_chat(prompt):
        ids, vision = _chat(loaded, TemplatedChat(prompt, {}), check)
    else:
        ids = _ids(cast("Sequence[object]", prompt), loaded.vocab_size)
    if not ids:
        raise ConfigError("the prompt is empty", expected="at least one token")
    if loaded.vision is not None and not (vision and vision.images):
        _check_placeholders(ids, loaded.vision.placeholder_ids)
    if vision is None and loaded.vision is not None:
        vision = text_prompt(loaded.vision, len(ids))
    check_length(len(ids), vision, max_length)
    return ids, vision


def check_length(num_tokens: int, vision: VisionPrompt | None, max_length: int) -> None:
    """Raise `CacheFull` where a prompt leaves no room for an answer."""
    if num_tokens >= max_length:
        images = "" if vision is None else f", {vision.num_tokens} of them image tokens"
        smaller = "" if vision is None else " or take fewer or smaller images,"
        raise CacheFull(
            "the prompt fills the context",
            got=f"{num_tokens} tokens{images}",
            expected=f"at most {max_length - 1}, one less than the context",
            fix=f"shorten the prompt,{smaller} or raise max_model_len if the model allows it",
        )


def _chat(loaded: LoadedModel, templated: TemplatedChat, check: Callable[[], None]) -> ReadPrompt:
    chat, options = templated.messages, templated.options
    if loaded.vision is not None and loaded.vision.processor is not None:
        messages, sources = split_chat(chat)
        with open_images(sources, templated.limits, check) as images:
            return read_chat(loaded.vision, messages, images, options)
    if loaded.vision is not None and has_images(chat):
        raise ConfigError("this vision-language model has no processor", fix="pass processor=...")
    tokenizer = tokenizer_of(loaded)
    messages = text_chat(chat)
    if not (getattr(tokenizer, "chat_template", None) or options.get("chat_template")):
        raise ConfigError("this model has no chat template", fix="give the prompt as a string")
    return list(tokenizer.encode(render(tokenizer, messages, options), add_special_tokens=False)), None


def _ids(prompt: Sequence[object], vocab_size: int) -> list[int]:
    ids = [scalar(token) for token in prompt]
    bad = [token for token in ids if type(token) is not int or not 0 <= token < vocab_size]
    if bad:
        raise ConfigError("a prompt holds what is no token id", got=brief(bad[0]), expected=f"0 to {vocab_size - 1}")
    return ids


def _check_placeholders(ids: list[int], placeholder_ids: Collection[int]) -> None:
    """A placeholder without an image would be read as whatever its own embedding says."""
    bad = next((i for i in ids if i in placeholder_ids), None)
    if bad is not None:
        raise ConfigError(
            "a prompt without images holds a token that stands for one",
            got=f"token {bad}",
            expected="a chat with the image",
            fix='put the image in a chat part: {"type": "image", "image": ...}',
        )
