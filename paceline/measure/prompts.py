"""The built-in prompts, and the reader of prompt files for all commands.

A line is a prompt. Lines of JSON (.gz as well) hold text, or an object with one of these keys:

    prompt                         raw text to continue, without chat template (with images, a user's message)
    question, instruction, text    a user's message
    turns                          what the user says, one message after each answer
    messages, chat                 a whole chat, as `LLM.generate` takes it; or the user's message as text

An "image" or a list of "images" comes before the text: URLs, or files beside the prompt file or in its folder `images`.
In a file that is not JSON every line is raw text to continue.
"""

import gzip
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigError
from ..system.files import MAX_BYTES, as_text, parse_json, read_bytes
from ..target.loaded import LoadedModel
from ..target.prompts import has_chat_template

Prompt: TypeAlias = str | list[Mapping[str, Any]]
_CHATS, _TEXTS = ("messages", "chat"), ("prompt", "question", "instruction", "text")
_KEYS = (*_CHATS, "turns", *_TEXTS)
_FILES = ("image", "path", "url")
"""Keys of an image part that may name a file; its "base64" holds the image itself."""
_ADDRESSES = ("data:", "http://", "https://")


class Example(NamedTuple):
    """A built-in prompt with a name short enough for a table."""

    name: str
    prompt: str


EXAMPLES = tuple(
    Example(**json.loads(line))
    for line in (resources.files("paceline.measure") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
)
"""Everyday work: some answers copy from the prompt, others do not. `paceline demo` shows the first four."""


@dataclass(frozen=True)
class PromptLine:
    """One line of a file.

    where: file and line, for errors. row: all keys. turns: the user's messages; empty for a chat. chat: its messages.
    is_bare: raw text to continue. images: URLs, and paths of existing files.
    """

    where: str
    number: int
    row: Mapping[str, Any]
    turns: tuple[str, ...] = ()
    chat: tuple[Mapping[str, Any], ...] = ()
    is_bare: bool = False
    images: tuple[str, ...] = ()

    @property
    def prompt(self) -> Prompt:
        """The first prompt, without later turns."""
        if self.is_bare:
            return self.turns[0]
        messages = [dict(message) for message in self.chat] or [{"role": "user", "content": self.turns[0]}]
        if self.images:
            first = next((message for message in messages if message.get("role") == "user"), messages[0])
            words = first["content"]
            words = [{"type": "text", "text": words}] if isinstance(words, str) else words
            first["content"] = [*({"type": "image", "image": image} for image in self.images), *words]
        return list[Mapping[str, Any]](messages)


def user_prompt(model: LoadedModel, text: str) -> Prompt:
    """A user's message where the model has a chat template, else the raw text."""
    return [{"role": "user", "content": text}] if has_chat_template(model) else text


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file; of several turns the first. Raises `ConfigError` as `read_lines`."""
    return [line.prompt for line in read_lines(path, limit)]


def read_lines(path: str | Path, limit: int | None = None) -> list[PromptLine]:
    """The first `limit` prompts of a file.

    Raises `ConfigError` for a file that cannot be read or has no prompts, and for an invalid line.
    """
    path = Path(path)
    # Not splitlines: JSON strings may hold U+2028 and its like.
    lines = [(i, line) for i, line in enumerate(_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{str(path)!r} has no prompts", expected="one prompt per line")
    is_json = ".json" in path.name or lines[0][1].lstrip().startswith("{")
    return [_line(line, number, path, is_json) for number, line in lines[:limit]]


def is_address(source: str) -> bool:
    """Whether an image is given by a URL and not by a file."""
    return source[:8].lower().startswith(_ADDRESSES)


def _text(path: Path) -> str:
    raw, name = read_bytes(path, "the prompts in"), f"the prompts in {str(path)!r}"
    if path.suffix == ".gz":
        try:
            raw = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{name} cannot be read", got=error, expected="a complete gzip file") from error
        if len(raw) > MAX_BYTES:
            raise ConfigError(
                f"{name} are too large unpacked", expected=f"at most {MAX_BYTES:,} bytes", fix="split the file"
            )
    return as_text(raw, name)


def _line(line: str, number: int, path: Path, is_json: bool) -> PromptLine:
    where = f"{path.name}, line {number}"
    row = parse_json(line, where) if is_json else line
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise ConfigError(f"not a JSON object ({where})", got=type(row).__name__)
    key = next((name for name in _KEYS if row.get(name) is not None), None)
    if key is None:
        raise ConfigError(
            f"no prompt ({where})", got="the keys " + ", ".join(map(str, row)), expected="one of " + ", ".join(_KEYS)
        )
    value, images = row[key], _images(row, path.parent, where)
    if key in _CHATS and not isinstance(value, str):
        return PromptLine(where, number, row, chat=_chat(value, key, path.parent, where), images=images)
    turns = tuple(value) if key == "turns" and isinstance(value, list) else (value,)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"{key!r} is no prompt ({where})", got=repr(value)[:80], expected="text that is not empty")
    return PromptLine(where, number, row, turns, is_bare=key == "prompt" and not images, images=images)


def _chat(value: object, key: str, folder: Path, where: str) -> tuple[Mapping[str, Any], ...]:
    """Messages, with the paths of their images resolved."""
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
        for message in value
    )
    if not is_chat or not value:
        raise ConfigError(
            f"{key!r} is no chat ({where})", got=repr(value)[:80], expected="a list of objects with role and content"
        )
    messages: Sequence[Mapping[str, Any]] = value  # type: ignore[assignment]
    return tuple({**message, "content": _content(message["content"], folder, where)} for message in messages)


def _content(content: str | list[Any], folder: Path, where: str) -> str | list[Any]:
    def whole(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type", "image") != "image":
            return part
        files = {key: part[key] for key in _FILES if isinstance(part.get(key), str)}
        return {**part, **{key: _source(source, folder, where) for key, source in files.items()}}

    return content if isinstance(content, str) else [whole(part) for part in content]


def _images(row: Mapping[str, Any], folder: Path, where: str) -> tuple[str, ...]:
    sources = row.get("images", row.get("image")) or []
    sources = [sources] if isinstance(sources, str) else sources
    if not isinstance(sources, list) or not all(isinstance(source, str) and source for source in sources):
        raise ConfigError(f"no list of images ({where})", got=repr(sources)[:80], expected="paths or URLs")
    return tuple(_source(source, folder, where) for source in sources)


def _source(source: str, folder: Path, where: str) -> str:
    if is_address(source):
        return source
    path = next((path for path in (folder / "images" / source, folder / source) if path.is_file()), None)
    if path is None:
        raise ConfigError(f"there is no such image ({where})", got=source, expected=f"a file below {str(folder)!r}")
    return str(path)
