"""Prompts that hold pictures, as training keeps them: the chat as its file tells it, and what was in each picture.

    prompts.jsonl     {"messages": [... {"type": "image", "image": "cat.jpg"} ...]}      paths beside the file
    answers.jsonl     "messages" with whole paths, "images": a hash of the pixels that the target's tower saw
    training          the pictures are opened again and must have these hashes

So answers are text, however large their pictures are.
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..core.vision import VisionPrompt
from ..errors import ConfigError
from ..hf.chats import has_images
from ..hf.prompts import Chat, read_prompt
from ..runner import ModelRunner

_PATHS = ("image", "url", "path")  # keys of a part that may name a file


@dataclass(frozen=True)
class PicturedChat:
    """text: the messages as JSON, which tells whole paths. images: `PromptImage.key` of each picture."""

    text: str
    images: tuple[str, ...]

    @property
    def messages(self) -> Chat:
        """As `LLM.generate` takes them."""
        return json.loads(self.text)


@dataclass(frozen=True)
class Asked:
    """A prompt to answer. chat: where it has pictures."""

    source: str
    token_ids: list[int]
    chat: PicturedChat | None = None


def asked(runner: ModelRunner, source: str, messages: Chat) -> Asked:
    """A chat as the model reads it. Raises as `read_prompt`."""
    ids, vision = read_prompt(runner.loaded, messages, runner.max_length)
    if not has_images(messages):
        return Asked(source, ids)
    assert vision is not None
    return Asked(source, ids, PicturedChat(json.dumps(messages), vision.keys))


def read_again(runner: ModelRunner, token_ids: Seq[int], chat: PicturedChat) -> VisionPrompt:
    """The pictures of a prompt. Raises `ConfigError` where a file is gone, or holds another picture by now."""
    ids, vision = read_prompt(runner.loaded, chat.messages, runner.max_length)
    assert vision is not None
    if vision.keys != chat.images or ids != list(token_ids):
        raise ConfigError(
            "the pictures of prepared answers are no longer those that were answered",
            got=f"{len(ids)} prompt tokens, pictures {_brief(vision.keys)}",
            expected=f"{len(token_ids)} prompt tokens, pictures {_brief(chat.images)}",
            fix="put the files back, or prepare answers anew in another folder",
        )
    return vision


def row_of(row: object, folder: Path, where: str) -> dict[str, object]:
    """A line of a file of prompts, paths made whole. Raises `ConfigError` unless it has one "prompt" or "messages"."""
    given = [key for key in ("prompt", "messages") if isinstance(row, dict) and key in row]
    if len(given) != 1 or (given == ["prompt"] and not (isinstance(row["prompt"], str) and row["prompt"].strip())):  # type: ignore[index, call-overload]
        raise ConfigError(f'no "prompt" ({where})', expected='{"prompt": ...} or {"messages": ...}, and "source"')
    found = cast("dict[str, object]", row)
    return found if given == ["prompt"] else {**found, "messages": placed(found["messages"], folder, where)}


def chat_of(row: Mapping[str, object]) -> Chat:
    """What such a line asks, a text being what the user says."""
    return cast("Chat", row.get("messages")) or [{"role": "user", "content": row["prompt"]}]


def placed(messages: object, folder: Path, where: str) -> list[dict[str, object]]:
    """The messages of a line of a file; paths of pictures are taken from the file's folder and made whole.

    Raises `ConfigError` for what is no list of messages; `chats` judges the rest.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ConfigError(f'"messages" is no chat ({where})', expected='[{"role": "user", "content": ...}, ...]')
    found = list[dict[str, object]]()
    for message in cast("list[Mapping[str, object]]", messages):
        content = message.get("content")
        if isinstance(content, list):
            content = [_placed(part, folder) if isinstance(part, Mapping) else part for part in content]
        found.append({**message, "content": content})
    return found


def _placed(part: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    if part.get("type") != "image":
        return part
    return {key: _whole(value, folder) if key in _PATHS else value for key, value in part.items()}


def _whole(value: object, folder: Path) -> object:
    if not isinstance(value, str) or value.lower().startswith(("data:", "http://", "https://")):
        return value
    return str((folder / Path(value).expanduser()).absolute())


def _brief(keys: Seq[str]) -> str:
    return ", ".join(key[:8] for key in keys) or "none"
