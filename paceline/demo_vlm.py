"""The demo for pictures: rendered scenes or the user's image, each question answered plainly and speculatively."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from PIL import Image

from .core.outputs import Timings
from .core.request import SamplingParams
from .drafters import DraftModel
from .errors import ConfigError
from .llm import LLM
from .outputs import Completion
from .scenes import KINDS, ask, make_scene, render

_FIRST_SEED = (1 << 41) + 1_000_000
"""Scenes from here on were never trained on, nor looked at in an evaluation."""


@dataclass(frozen=True)
class Query:
    """A question; answer: the right one, None where nobody knows."""

    kind: str
    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Shown:
    """A picture, what is in it (empty where nobody knows), and the questions about it."""

    name: str
    image: Image.Image
    description: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Side:
    """An answer and the seconds that it took, by part."""

    completion: Completion
    timings: Timings

    @property
    def seconds(self) -> float:
        """From the question to the last token."""
        return self.timings.vision + self.timings.prefill + self.timings.decode

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, the reading of picture and question apart."""
        return len(self.completion.token_ids) / self.timings.decode if self.timings.decode else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.completion.text,
            "tokens": len(self.completion.token_ids),
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "mean_acceptance_length": self.completion.mean_acceptance_length,
            "split": asdict(self.timings),
        }


@dataclass(frozen=True)
class Answered:
    """One question, answered both ways."""

    shown: Shown
    query: Query
    plain: Side
    speculative: Side

    @property
    def identical(self) -> bool:
        """The same tokens."""
        return self.plain.completion.token_ids == self.speculative.completion.token_ids

    @property
    def right(self) -> bool | None:
        """Whether the answer is the known one."""
        return None if self.query.answer is None else self.speculative.completion.text.strip() == self.query.answer


def rendered(count: int, seed: int = 0) -> list[Shown]:
    """`count` scenes, each with a question of every kind; kinds of scene take turns, so that two differ."""
    wanted, found = ("shapes", "bars", "sign", "shapes"), list[Shown]()
    at = _FIRST_SEED + 1000 * seed
    while len(found) < count:
        scene = make_scene(at)
        if scene.kind == wanted[len(found) % len(wanted)]:
            queries = tuple(Query(q.kind, q.text, q.answer) for q in (ask(scene, kind, at) for kind in KINDS))
            told = ask(scene, "caption", at).answer
            found.append(Shown(f"scene {at - _FIRST_SEED}", render(scene), told, queries))
        at += 1
    return found


def demo_vlm(llm: LLM, pictures: Seq[Shown], params: SamplingParams) -> Iterator[Answered]:
    """Answer every question plainly and with speculation; the two take turns picture by picture.

    Before each turn what was seen is forgotten, so that both look at the picture once: with its first question.
    Raises `ConfigError` for a model that sees nothing, or without pictures.
    """
    if llm.loaded.vision is None:
        raise ConfigError("this model has no eyes", got=llm.loaded.name, fix="take a vision-language model")
    if not pictures:
        raise ConfigError("there is nothing to show", got="no pictures")
    sides = (llm.plain(), llm)
    for side in sides:  # the first passes pay for memory and kernels that later ones have
        _answer(side, pictures[0].image, pictures[0].queries[0], replace(params, max_tokens=min(12, params.max_tokens)))
    for shown in pictures:
        answers: list[list[Side]] = []
        for side in sides:
            forget(llm)
            answers.append([_answer(side, shown.image, query, params) for query in shown.queries])
        for query, plain, speculative in zip(shown.queries, *answers, strict=True):
            yield Answered(shown, query, plain, speculative)


def forget(llm: LLM) -> None:
    """Empty the caches of what was seen, those of a draft model too."""
    llm.runner.reader.forget()
    if isinstance(llm.decoder.drafter, DraftModel):
        llm.decoder.drafter.runner.reader.forget()


def totals(answered: Seq[Answered]) -> dict[str, Any]:
    """Sums of tokens over sums of seconds, and how many answers were identical and right."""
    told: dict[str, Any] = {}
    for name, sides in (("plain", [a.plain for a in answered]), ("speculative", [a.speculative for a in answered])):
        tokens = sum(len(side.completion.token_ids) for side in sides)
        told[f"{name}_tokens_per_s"] = tokens / max(sum(side.timings.decode for side in sides), 1e-9)
        told[f"{name}_seconds"] = sum(side.seconds for side in sides)
        parts = ("vision", "prefill", "draft", "verify", "rest")
        told[f"{name}_split"] = {part: sum(getattr(side.timings, part) for side in sides) for part in parts}
    known = [answer.right for answer in answered if answer.right is not None]
    told["speedup"] = told["speculative_tokens_per_s"] / told["plain_tokens_per_s"]
    told["num_identical"] = sum(answer.identical for answer in answered)
    told["identical"] = told["num_identical"] == len(answered)
    told["num_right"], told["num_known"] = sum(known), len(known)
    return told


def _answer(side: LLM, image: Image.Image, query: Query, params: SamplingParams) -> Side:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": query.text}]
    (output,) = side.generate([{"role": "user", "content": parts}], params)
    return Side(output.outputs[0], output.timings)
