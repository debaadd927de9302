"""The images and questions of easy-VQA (vzhou842/easy-VQA), unpacked."""

import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from paceline.errors import ConfigError


class EasyVqa(NamedTuple):
    """One image of easy-VQA (64 x 64, one shape), and its questions, as sentences, with their one-word answers."""

    path: Path
    questions: tuple[tuple[str, str], ...]

    def image(self) -> Image.Image:
        with Image.open(self.path) as image:
            return image.convert("RGB")


def load_easy_vqa(folder: Path, split: str = "train") -> list[EasyVqa]:
    """Images of a split ("train" or "test") of the unpacked archive, in order.

    Raises `ConfigError` for another folder.
    """
    file = folder / split / "questions.json"
    if not file.is_file():
        raise ConfigError(
            f"no easy-VQA at {str(folder)!r}", expected=f"a folder with {split}/questions.json and {split}/images"
        )
    asked: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for question, answer, image in json.loads(file.read_text(encoding="utf-8")):
        asked[image].append((question[0].upper() + question[1:], answer))
    return [EasyVqa(folder / split / "images" / f"{i}.png", tuple(found)) for i, found in sorted(asked.items())]
