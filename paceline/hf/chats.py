"""Splits chats into the messages for the chat template and the images, in order."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..schema import brief
from .images import ImageSource

Message: TypeAlias = Mapping[str, object]
"""With "role" and "content": a text, or a list of parts, each a text or an image."""

_SOURCES = ("image", "url", "path", "base64")  # as transformers takes them
_KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), ("text",)),
    "image": _SOURCES,
    "image_url": ("image_url",),
}
"""The keys of a part beside "type", for each type."""
_KINDS = 'a part is {"type": "text", "text": ...}, {"type": "image", "image": ...} or {"type": "image_url", ...}'


def has_images(chat: Sequence[Message]) -> bool:
    """Whether a chat holds an image. Raises `ConfigError` as `split_chat`."""
    return any(is_image for message in chat for is_image, _ in _parts(message))


def split_chat(chat: Sequence[Message]) -> tuple[list[dict[str, object]], list[ImageSource]]:
    """The messages as a processor's chat template takes them, each content a list of parts, and the images.

    Parts may have the form of transformers or of the OpenAI API. Raises `ConfigError` for any other kind of part.
    """
    messages, images = list[dict[str, object]](), list[ImageSource]()
    for message in chat:
        content: list[dict[str, str]] = []
        for is_image, value in _parts(message):
            if is_image:
                images.append(value)
            content.append({"type": "image"} if is_image else {"type": "text", "text": value})
        messages.append({**message, "content": content})
    return messages, images


def text_chat(chat: Sequence[Message]) -> list[dict[str, object]]:
    """The messages as the template of a text model takes them, each content one string.

    Raises `ConfigError` where there is an image.
    """
    if has_images(chat):
        raise ConfigError(
            "this model takes text alone", got="a chat with an image", fix="leave the image out, or use a vision model"
        )
    return [{**message, "content": "".join(text for _, text in _parts(message))} for message in chat]


def _parts(message: Message) -> list[tuple[bool, Any]]:
    """For each part of a message whether it is an image, and its text or the source of its image."""
    if not isinstance(message, Mapping):
        raise ConfigError(
            "a chat holds what is no message", got=brief(message), expected='{"role": ..., "content": ...}'
        )
    if not isinstance(message.get("role"), str):
        raise ConfigError("a message has no role", got=brief(message.get("role")), expected="a string such as 'user'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return [(False, "")]
    if isinstance(content, str):
        return [(False, content)]
    if not isinstance(content, list | tuple) or not content:
        raise ConfigError("a message has no content", got=brief(content), expected="a text, or a list of parts")
    return [_part(part) for part in content]


def _part(part: object) -> tuple[bool, Any]:
    if not isinstance(part, Mapping):
        raise ConfigError("a message holds what is no part", got=brief(part), expected=_KINDS)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ConfigError("a message holds a part of unknown kind", got=brief(kind), expected=_KINDS)
    _refuse_others(part, kind, _KEYS[kind])
    if kind == "image":
        return True, _source(part)
    if kind == "image_url":
        return True, _url(part.get("image_url"))
    if not isinstance(text := part.get("text"), str):
        raise ConfigError("a part of a message has no text", got=brief(text), expected='{"type": "text", "text": ...}')
    return False, text


def _url(inner: object) -> str:
    """That of OpenAI's form; its "detail" has no meaning here, since the processor sets the resolution."""
    if isinstance(inner, Mapping):
        _refuse_others(inner, "image_url", ("url", "detail"))
        inner = inner.get("url")
    if not isinstance(inner, str) or not inner.lower().startswith(("http://", "https://", "data:")):
        raise ConfigError(
            "an image_url must be a data: or http(s) URL", got=brief(inner),
            expected='{"type": "image_url", "image_url": {"url": "https://..."}}, or "data:image/png;base64,..."',
            fix='name files by {"type": "image", "image": "picture.png"}',
        )  # fmt: skip
    return inner


def _source(part: Mapping[str, object]) -> ImageSource:
    sources = [key for key in _SOURCES if part.get(key) is not None]
    if len(sources) != 1:
        got = " and ".join(sources) or "none"
        raise ConfigError("an image needs one source", got=got, expected='{"type": "image", "image": "picture.png"}')
    value = part[sources[0]]
    return f"data:;base64,{value}" if sources[0] == "base64" else value  # type: ignore[return-value]  # open_image judges


def _refuse_others(part: Mapping[str, object], kind: str, known: tuple[str, ...]) -> None:
    for key in part:
        if key not in ("type", *known):
            message = f"a part of kind {kind!r} has an unknown key"
            raise ConfigError(message, got=brief(key), expected=" or ".join(known))
