"""Prompts of both kinds from a file: one JSON object a line, with text and, where there are any, images.

    {"prompt": "..."}                              text to continue
    {"question": "...", "image": "a.png"}          a user's message, with images before the words
    {"chat": [{"role": "user", "content": ...}]}   as `LLM.generate` takes it; "messages" is the same

Image files are found beside the prompt file.
"""

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from os import PathLike
from pathlib import Path
from typing import TypeGuard, cast

from PIL import Image

from ..errors import ConfigError
from ..prompts_of import Prompt
from ..provenance import hash_prompts, sha256_of

_TEXTS = ("prompt", "question", "instruction")
_CHATS = ("chat", "messages")
_FILES = ("image", "path", "url")
"""Keys of an image part that may name a file, as `chats` takes them; its "base64" holds the picture itself."""
_ADDRESSES = ("data:", "http://", "https://")


def read_prompt_file(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts. Raises `ConfigError` for a file that cannot be read, or a line without a prompt."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or error
        raise ConfigError(f"the prompts in {str(path)!r} cannot be read", got=got) from error
    found: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and (limit is None or len(found) < limit):
            found.append(_prompt_of(line, path.parent, f"{path.name}, line {number}"))
    if not found:
        raise ConfigError(f"{str(path)!r} holds no prompts", expected="one JSON object a line")
    return found


def hash_of(prompts: Seq[Prompt]) -> str:
    """Hash prompts and the content of their images, addresses apart, in hexadecimal.

    Raises `ConfigError` for an image file that cannot be read.
    """
    return hash_prompts([json.dumps(_with_contents(one), sort_keys=True) for one in prompts])


def text_of(prompt: Prompt) -> str:
    """The words of a prompt, for people."""
    if isinstance(prompt, str):
        return prompt
    if not prompt or not isinstance(prompt[0], Mapping):
        return " ".join(map(str, prompt))
    told: list[str] = []
    for message in cast("list[Mapping[str, object]]", prompt):
        content = message["content"]
        words = [content] if isinstance(content, str) else [str(p.get("text", "")) for p in _parts(content)]
        told.append(" ".join(filter(None, words)))
    return "\n".join(told)


def _parts(content: object) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", content) if isinstance(content, list) else []


def _prompt_of(line: str, folder: Path, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON ({where})", got=error.msg, expected="one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"not a JSON object ({where})", got=type(row).__name__)
    images = row.get("images", row.get("image", []))
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise ConfigError(f"no list of images ({where})", got=repr(images), expected="paths, or addresses")
    sources = [_source(one, folder, where) for one in images]
    for key in _CHATS:
        if isinstance(chat := row.get(key), str):
            return _user(chat, sources)
        if isinstance(chat, list) and chat and all(isinstance(m, dict) and "content" in m for m in chat):
            return _with_images(chat, sources, folder, where)
    for key in _TEXTS:
        if isinstance(text := row.get(key), str) and text.strip():
            return text if key == "prompt" and not sources else _user(text, sources)
    expected = ", ".join(f'"{key}"' for key in (*_TEXTS, *_CHATS))
    raise ConfigError(f"no prompt ({where})", got="the keys " + ", ".join(map(str, row)), expected=expected)


def _user(text: str, sources: list[str]) -> Prompt:
    if not sources:
        return [{"role": "user", "content": text}]
    return cast("Prompt", [{"role": "user", "content": [*map(_image, sources), {"type": "text", "text": text}]}])


def _with_images(chat: list[dict[str, object]], sources: list[str], folder: Path, where: str) -> Prompt:
    """A chat with paths made whole, and further images before the words of its first message."""
    made = [dict(message) for message in chat]
    for message in made:
        if isinstance(message["content"], list):
            message["content"] = [
                {
                    key: _source(str(one), folder, where) if _names_file(part, key, one) else one
                    for key, one in part.items()
                }
                for part in _parts(message["content"])
            ]
    if sources:
        first = next((m for m in made if m.get("role") == "user"), made[0])
        content = first["content"]
        words = [{"type": "text", "text": content}] if isinstance(content, str) else _parts(content)
        first["content"] = [*map(_image, sources), *words]
    return cast("Prompt", made)


def _image(source: str) -> dict[str, object]:
    return {"type": "image", "image": source}


def _source(given: str, folder: Path, where: str) -> str:
    if _is_address(given):
        return given
    path = folder / given
    if not path.is_file():
        raise ConfigError(f"there is no such image ({where})", got=given, expected=f"a file below {str(folder)!r}")
    return str(path)


def _is_address(given: str) -> bool:
    return given[:8].lower().startswith(_ADDRESSES)


def _names_file(part: Mapping[str, object], key: str, value: object) -> TypeGuard[str]:
    return part.get("type", "image") == "image" and key in _FILES and isinstance(value, str)


def _with_contents(value: object) -> object:
    """The prompt with every image that is no address replaced by its hash."""
    if isinstance(value, Mapping):
        return {
            key: _content(one) if _names_file(value, key, one) else _with_contents(one) for key, one in value.items()
        }
    if isinstance(value, bytes | bytearray | memoryview | PathLike | Image.Image):
        return _content(value)
    return [_with_contents(one) for one in value] if isinstance(value, list | tuple) else value


def _content(source: object) -> object:
    """Of an image as `open_image` takes it."""
    if isinstance(source, Image.Image):
        told = f"{source.mode} {source.size} {source.getpalette()} ".encode()
        return {"sha256": hashlib.sha256(told + source.tobytes()).hexdigest()}
    if isinstance(source, bytes | bytearray | memoryview):
        return {"sha256": hashlib.sha256(source).hexdigest()}
    if _is_address(str(source)):
        return str(source)
    try:
        return {"sha256": sha256_of(str(source))}
    except OSError as error:
        raise ConfigError(f"the image {str(source)!r} cannot be read", got=error.strerror) from error
