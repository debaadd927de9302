"""What a finished model answers, by real greedy decoding: an answer counts when it is the right one word for word."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from paceline.core.request import SamplingParams
from paceline.eval.suites import load_easy_vqa
from paceline.llm import LLM
from paceline.system.files import parse_json, read_text
from paceline.train.run_folder import understood

from .config import EvalSection
from .lessons import HELD_OUT
from .questions import KINDS, ask
from .scene import make_scene, render

_TOGETHER = 8


@dataclass(frozen=True)
class Asked:
    """A question with its answer. names: what a caption should name; empty: nothing is counted."""

    image: Image.Image
    question: str
    answer: str
    names: tuple[str, ...] = ()

    @property
    def chat(self) -> list[dict[str, Any]]:
        """As a user's message."""
        return [
            {
                "role": "user",
                "content": [{"type": "image", "image": self.image}, {"type": "text", "text": self.question}],
            }
        ]


def suites(config: EvalSection, easy_vqa: str | None) -> dict[str, list[Asked]]:
    """Held-out scenes by kind of question, then easy-VQA's test split and NLVR where there are folders for them."""
    asked: dict[str, list[Asked]] = {kind: [] for kind in KINDS}
    for seed in range(HELD_OUT, HELD_OUT + config.scenes):
        scene = make_scene(seed)
        picture = render(scene)
        for kind in KINDS:
            question = ask(scene, kind, seed * 8)
            names = tuple(thing.name for thing in scene.things) if kind == "caption" else ()
            asked[kind].append(Asked(picture, question.text, question.answer, names))
    if easy_vqa is not None:
        test = load_easy_vqa(Path(easy_vqa), "test")[: config.easy]
        asked["easy-VQA test"] = [Asked(one.image(), *question) for one in test for question in one.questions]
    if config.nlvr is not None:
        asked["NLVR dev"] = load_nlvr(Path(config.nlvr), config.nlvr_limit)
    return asked


def evaluate(
    folder: Path, asked: dict[str, list[Asked]], config: EvalSection, device: str | None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Decode everything; yields suite, questions done, and the suite's result so far."""
    answers = _paceline if config.engine == "paceline" else _transformers
    answer = answers(folder, config, device)
    for name, questions in asked.items():
        right, named, captions = 0, 0, 0
        for begin in range(0, len(questions), _TOGETHER):
            some = questions[begin : begin + _TOGETHER]
            for one, text in zip(some, answer(some), strict=True):
                right += text.strip() == one.answer
                captions += bool(one.names)
                named += bool(one.names) and all(name in text for name in one.names)
            done = begin + len(some)
            result: dict[str, Any] = {"right": right / done, "questions": done}
            if captions:
                result["every shape named"] = named / captions
            yield name, done, result


def _paceline(folder: Path, config: EvalSection, device: str | None):
    llm = LLM(str(folder), dtype=config.dtype, device=device, numerics="fast", max_batch_size=_TOGETHER)
    params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens)

    def answer(some: Seq[Asked]) -> list[str]:
        return [one.outputs[0].text for one in llm.generate([question.chat for question in some], params)]

    return answer


def _transformers(folder: Path, config: EvalSection, device: str | None):
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=config.dtype, trust_remote_code=False)
    model = model.to(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))).eval()

    def one_by_one(some: Seq[Asked]) -> list[str]:
        told: list[str] = []
        for question in some:
            inputs = processor.apply_chat_template(
                question.chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            ).to(model.device, model.dtype)
            with torch.inference_mode():
                ids = model.generate(**inputs, max_new_tokens=config.max_tokens, do_sample=False)
            told.append(processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        return told

    return one_by_one


def load_nlvr(folder: Path, limit: int | None) -> list[Asked]:
    """Statements about the first of the six orders of their boxes. Raises `ConfigError` for another folder."""
    asked: list[Asked] = []
    with understood(f"NLVR in {str(folder)!r}", "name a folder with dev.json and images/"):
        for number, line in enumerate(read_text(folder / "dev.json", "NLVR's").splitlines()[:limit], start=1):
            row = parse_json(line, f"line {number} of {str(folder / 'dev.json')!r}")
            with Image.open(folder / "images" / row["directory"] / f"dev-{row['identifier']}-0.png") as image:
                picture = image.convert("RGB")
            text = f"{row['sentence'].strip().rstrip('.')}. Is that true?"
            asked.append(Asked(picture, text[0].upper() + text[1:], "yes" if row["label"] == "true" else "no"))
    return asked


def table_of(results: dict[str, Any]) -> dict[str, float]:
    """Rows of the card's table."""
    rows: dict[str, float] = {}
    for suite, result in results.items():
        rows[f"{suite}, {result['questions']} questions"] = result["right"]
        if "every shape named" in result:
            rows[f"{suite}, every shape named"] = result["every shape named"]
    return rows
