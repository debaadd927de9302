"""Questions about pictures that come with their answers: scenes that Paceline draws, and easy-VQA.

A scene of a held-out seed is asked one question, so that answers of all kinds come from as many pictures.
"""

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..hf.images import ImageSource
from ..scenes import HELD_OUT, KINDS, ask, make_scene, render
from ..scenes.easy_vqa import load_easy_vqa

IMAGE_SUITES = ("scenes", "easy_vqa")
SCENES_PER_KIND = 60


@dataclass(frozen=True)
class Pictured:
    """A picture, a question and its right answer. kind: the class of the answer, which says how long it is."""

    id: str
    kind: str
    text: str
    right: str
    image: ImageSource


def scenes(per_kind: int = SCENES_PER_KIND, first: int = 0) -> list[Pictured]:
    """Questions of every kind about scenes that no model was trained on, the kinds taking turns.

    first: scenes left out at the beginning, for a sample that shares none with another.
    """
    made = []
    for number in range(first * len(KINDS), (first + per_kind) * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        scene = make_scene(HELD_OUT + number)
        question = ask(scene, kind, HELD_OUT + number)
        made.append(Pictured(f"scene-{number}", kind, question.text, question.answer, render(scene)))
    return made


def easy_vqa(data: str | Path | None, split: str = "test") -> list[Pictured]:
    """The questions of easy-VQA. data: the unpacked folder, or one with `easy_vqa` in it. Raises `ConfigError`."""
    if data is None:
        raise ConfigError(
            "the pictures of easy_vqa are not part of Paceline", got="no --data",
            expected="the folder that holds easy_vqa/test/questions.json",
            fix="fetch easy-VQA (vzhou842/easy-VQA), unpack it and give its folder as --data",
        )  # fmt: skip
    folder = Path(data)
    examples = load_easy_vqa(folder / "easy_vqa" if (folder / "easy_vqa").is_dir() else folder, split)
    return [
        Pictured(
            f"{example.path.stem}-{place}", "yes/no" if right in ("yes", "no") else "short", text, right,
            str(example.path),
        )
        for example in examples
        for place, (text, right) in enumerate(example.questions)
    ]  # fmt: skip
