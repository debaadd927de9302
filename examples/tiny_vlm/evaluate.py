"""Answers of a finished model by real greedy decoding: one counts when it is the right one word for word."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from paceline import LLM, SamplingParams

from .config import EvalSection
from .questions import KINDS, ask, load_easy_vqa
from .scene import HELD_OUT, make_scene, render

_TOGETHER = 8


@dataclass(frozen=True)
class Asked:
    """A question with its answer. names: the shapes that a caption should name; empty: they are not counted."""

    image: Image.Image
    question: str
    answer: str
    names: tuple[str, ...] = ()

    @property
    def chat(self) -> list[dict[str, Any]]:
        """As a user's message."""
        parts = [{"type": "image", "image": self.image}, {"type": "text", "text": self.question}]
        return [{"role": "user", "content": parts}]


def suites(config: EvalSection, easy_vqa: str | None) -> dict[str, list[Asked]]:
    """Held-out scenes by kind of question, then easy-VQA's test split where there is a folder for it."""
    asked: dict[str, list[Asked]] = {kind: [] for kind in KINDS}
    for seed in range(HELD_OUT, HELD_OUT + config.scenes):
        scene = make_scene(seed)
        image = render(scene)
        for kind in KINDS:
            question = ask(scene, kind, seed * 8)
            names = tuple(thing.name for thing in scene.things) if kind == "caption" else ()
            asked[kind].append(Asked(image, question.text, question.answer, names))
    if easy_vqa is not None:
        test = load_easy_vqa(Path(easy_vqa), "test")[: config.easy]
        asked["easy-VQA test"] = [Asked(one.image(), *question) for one in test for question in one.questions]
    return asked


def evaluate(
    folder: Path, asked: dict[str, list[Asked]], config: EvalSection, device: str | None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Decode everything in float32; yields suite, questions done, and the suite's result so far."""
    llm = LLM(str(folder), dtype="float32", device=device, numerics="fast", max_num_seqs=_TOGETHER)
    params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens)
    for name, questions in asked.items():
        right, named, captions = 0, 0, 0
        for begin in range(0, len(questions), _TOGETHER):
            some = questions[begin : begin + _TOGETHER]
            for one, output in zip(some, llm.generate([question.chat for question in some], params), strict=True):
                text = output.outputs[0].text
                right += text.strip() == one.answer
                captions += bool(one.names)
                named += bool(one.names) and all(name in text for name in one.names)
            done = begin + len(some)
            result: dict[str, Any] = {"right": right / done, "questions": done}
            if captions:
                result["every shape named"] = named / captions
            yield name, done, result


def table_of(results: dict[str, Any]) -> dict[str, float]:
    """Rows of the card's table."""
    rows: dict[str, float] = {}
    for suite, result in results.items():
        rows[f"{suite}, {result['questions']} questions"] = result["right"]
        if "every shape named" in result:
            rows[f"{suite}, every shape named"] = result["every shape named"]
    return rows
