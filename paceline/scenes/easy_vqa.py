"""easy-VQA (github.com/vzhou842/easy-VQA, MIT): 5,000 pictures of one shape, 48,248 questions with one-word answers."""

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import ConfigError


@dataclass(frozen=True)
class EasyVqa:
    """One picture and its questions with answers, written as sentences."""

    path: Path
    questions: tuple[tuple[str, str], ...]

    def image(self) -> Image.Image:
        """The picture, RGB, 64 x 64."""
        with Image.open(self.path) as image:
            return image.convert("RGB")


def load_easy_vqa(folder: Path, split: str = "train") -> list[EasyVqa]:
    """Pictures of a split ("train" or "test") of the unpacked archive, in order.

    Raises `ConfigError` for another folder.
    """
    file = folder / split / "questions.json"
    if not file.is_file():
        raise ConfigError(
            f"no easy-VQA at {str(folder)!r}", expected=f"a folder with {split}/questions.json and {split}/images"
        )
    asked: dict[int, list[tuple[str, str]]] = {}
    for question, answer, image in json.loads(file.read_text(encoding="utf-8")):
        asked.setdefault(image, []).append((question[0].upper() + question[1:], answer))
    return [EasyVqa(folder / split / "images" / f"{i}.png", tuple(qs)) for i, qs in sorted(asked.items())]
