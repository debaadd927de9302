"""Prompts to train on, read from files of prompts; of a prompt with images the chat and a hash of each image are kept.

    prompts.jsonl     {"messages": [... {"type": "image", "image": "cat.jpg"} ...]}      see `eval.prompts`
    answers.jsonl     "messages" with whole paths, "images": a hash of the pixels that the target's tower got
    training          the images are opened again and must have these hashes

So answers are text, however large their images are.
"""

import json
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from ..core.vision import VisionPrompt
from ..errors import CacheFull, ConfigError
from ..eval.prompts import PromptLine, read_lines
from ..hf.chats import has_images
from ..hf.image_prompts import text_prompt
from ..hf.prompts import Chat, read_prompt
from ..runner import ModelRunner


@dataclass(frozen=True)
class ImageChat:
    """A chat with images. text: the messages as JSON, with whole paths. images: `PromptImage.key` of each image."""

    text: str
    images: tuple[str, ...]

    @property
    def messages(self) -> Chat:
        """As `LLM.generate` takes them."""
        return json.loads(self.text)


@dataclass(frozen=True)
class TrainPrompt:
    """A prompt that the target is to answer. chat: where it has images."""

    source: str
    token_ids: list[int]
    chat: ImageChat | None = None


def read_files(paths: Iterable[str]) -> list[PromptLine]:
    """The prompts of all files, with whole paths of images. Raises `ConfigError` where there is none."""
    lines = [line for path in paths for line in read_lines(Path(path).absolute())]
    if not lines:
        raise ConfigError(
            "there are no prompts to answer", fix="name files in the configuration, as prompts: [a.jsonl]"
        )
    return lines


def chat_of(line: PromptLine) -> Chat:
    """The chat that a line asks; bare text is what the user says."""
    return [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt


def encode_line(runner: ModelRunner, line: PromptLine) -> TrainPrompt | None:
    """A line as the model reads it: in a chat, where it has a template for one. None where it fills the context."""
    source, tokenizer = str(line.row.get("source", "")), runner.loaded.tokenizer
    if line.is_bare and runner.loaded.vision is None and not getattr(tokenizer, "chat_template", None):
        assert tokenizer is not None
        return TrainPrompt(source, list(tokenizer.encode(line.turns[0])))
    try:
        return encode_chat(runner, source, chat_of(line))
    except CacheFull:
        return None


def encode_chat(runner: ModelRunner, source: str, messages: Chat) -> TrainPrompt:
    """A chat as the model reads it. Raises as `read_prompt`."""
    ids, vision = read_prompt(runner.loaded, messages, runner.max_length)
    if not has_images(messages):
        return TrainPrompt(source, ids)
    assert vision is not None
    return TrainPrompt(source, ids, ImageChat(json.dumps(messages), vision.keys))


def vision_of(runner: ModelRunner, token_ids: Seq[int], chat: ImageChat | None) -> VisionPrompt | None:
    """The images of a prompt as the runner takes them; None where the model reads text alone.

    Raises `ConfigError` where a file is gone, or holds another image by now.
    """
    if chat is None:
        return None if runner.loaded.vision is None else text_prompt(runner.loaded.vision, len(token_ids))
    ids, vision = read_prompt(runner.loaded, chat.messages, runner.max_length)
    assert vision is not None
    if vision.keys != chat.images or ids != list(token_ids):
        raise ConfigError(
            "the images of prepared answers are no longer those that were answered",
            got=f"{len(ids)} prompt tokens, images {_brief(vision.keys)}",
            expected=f"{len(token_ids)} prompt tokens, images {_brief(chat.images)}",
            fix="put the files back, or prepare answers anew in another folder",
        )
    return vision


def _brief(keys: Seq[str]) -> str:
    return ", ".join(key[:8] for key in keys) or "none"
