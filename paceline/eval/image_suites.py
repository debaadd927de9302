"""easy-VQA (github.com/vzhou842/easy-VQA, MIT): 5,000 images of one shape, 48,248 questions with one-word answers."""

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import ConfigError

IMAGE_SUITES = ("easy_vqa",)


@dataclass(frozen=True)
class EasyVqa:
    """One image, and its questions with their answers; the questions are written as sentences."""

    path: Path
    questions: tuple[tuple[str, str], ...]

    def image(self) -> Image.Image:
        """The image, RGB, 64 x 64."""
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
    asked: dict[int, list[tuple[str, str]]] = {}
    for question, answer, image in json.loads(file.read_text(encoding="utf-8")):
        asked.setdefault(image, []).append((question[0].upper() + question[1:], answer))
    return [EasyVqa(folder / split / "images" / f"{i}.png", tuple(qs)) for i, qs in sorted(asked.items())]


def easy_vqa(data: str | Path | None, split: str = "test") -> list[EasyVqa]:
    """The images of the suite. data: the unpacked folder, or one with `easy_vqa` in it. Raises `ConfigError`."""
    if data is None:
        raise ConfigError(
            "the pictures of easy_vqa are not part of Paceline", got="no --data",
            expected="the folder that holds easy_vqa/test/questions.json",
            fix="fetch easy-VQA (vzhou842/easy-VQA), unpack it and give its folder as --data",
        )  # fmt: skip
    folder = Path(data)
    return load_easy_vqa(folder / "easy_vqa" if (folder / "easy_vqa").is_dir() else folder, split)
