"""The demo with images: questions about drawn scenes, or about your image, answered plainly and with speculation."""

import io
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline import LLM, SamplingParams
from paceline.core.outputs import Timings
from paceline.drafters import DraftModel
from paceline.errors import ConfigError
from paceline.outputs import Completion
from paceline.system.files import check_out, write_bytes

from .questions import KINDS, ask
from .scene import HELD_OUT, make_scene, render

COMMAND = "python -m examples.tiny_vlm demo"
_FIRST_SEED = HELD_OUT + 1_000_000
"""Scenes from here on were neither trained on nor used in an evaluation."""


@dataclass(frozen=True)
class Query:
    """A question. answer: the right one, None where it is not known."""

    kind: str
    text: str
    answer: str | None = None


@dataclass(frozen=True)
class Shown:
    """An image, a description of what is in it (empty where that is not known), and the questions about it."""

    name: str
    image: Image.Image
    description: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Side:
    """An answer, and the seconds of each part of it."""

    completion: Completion
    timings: Timings

    @property
    def seconds(self) -> float:
        """From the question to the last token."""
        return self.timings.vision + self.timings.prefill + self.timings.decode

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, without the prefill of image and question."""
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
        """Whether both answers have the same tokens."""
        return self.plain.completion.token_ids == self.speculative.completion.token_ids

    @property
    def right(self) -> bool | None:
        """Whether the answer is the known one."""
        return None if self.query.answer is None else self.speculative.completion.text.strip() == self.query.answer

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "image": self.shown.name,
            "description": self.shown.description or None,
            **asdict(self.query),
            "right": self.right,
            "identical": self.identical,
            "plain": self.plain.as_dict(),
            "speculative": self.speculative.as_dict(),
        }


def scenes(count: int, seed: int = 0) -> list[Shown]:
    """`count` scenes with a question of every kind each; the kinds of scene take turns."""
    wanted, found = ("shapes", "bars", "sign", "shapes"), list[Shown]()
    at = _FIRST_SEED + 1000 * seed
    while len(found) < count:
        scene = make_scene(at)
        if scene.kind == wanted[len(found) % len(wanted)]:
            queries = tuple(Query(q.kind, q.text, q.answer) for q in (ask(scene, kind, at) for kind in KINDS))
            caption = ask(scene, "caption", at).answer
            found.append(Shown(f"scene {at - _FIRST_SEED}", render(scene), caption, queries))
        at += 1
    return found


def answer_both_ways(llm: LLM, images: Seq[Shown], params: SamplingParams) -> Iterator[Answered]:
    """Answer every question plainly and with speculation; the two take turns, image by image.

    The vision features are dropped before each turn, so that each side encodes an image once, with its first question.
    Raises `ConfigError` for a model without a vision tower.
    """
    if llm.loaded.vision is None:
        raise ConfigError("this model cannot read images", got=llm.loaded.name, fix="take a vision-language model")
    sides = (llm.plain(), llm)
    for side in sides:  # the first passes pay for memory and kernels that later ones have
        _answer(side, images[0].image, images[0].queries[0], replace(params, max_tokens=min(12, params.max_tokens)))
    for shown in images:
        answers: list[list[Side]] = []
        for side in sides:
            llm.runner.images.forget()
            if isinstance(llm.decoder.drafter, DraftModel):
                llm.decoder.drafter.runner.images.forget()
            answers.append([_answer(side, shown.image, query, params) for query in shown.queries])
        for query, plain, speculative in zip(shown.queries, *answers, strict=True):
            yield Answered(shown, query, plain, speculative)


def _answer(side: LLM, image: Image.Image, query: Query, params: SamplingParams) -> Side:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": query.text}]
    (output,) = side.generate([{"role": "user", "content": parts}], params)
    return Side(output.outputs[0], output.timings)


def totals(answered: Seq[Answered]) -> dict[str, Any]:
    """Tokens per second of each side over all questions, and how many answers were identical and right."""
    total: dict[str, Any] = {}
    for name, sides in (("plain", [a.plain for a in answered]), ("speculative", [a.speculative for a in answered])):
        tokens = sum(len(side.completion.token_ids) for side in sides)
        total[f"{name}_tokens_per_s"] = tokens / max(sum(side.timings.decode for side in sides), 1e-9)
        total[f"{name}_seconds"] = sum(side.seconds for side in sides)
        parts = ("vision", "prefill", "draft", "verify", "rest")
        total[f"{name}_split"] = {part: sum(getattr(side.timings, part) for side in sides) for part in parts}
    known = [answer.right for answer in answered if answer.right is not None]
    total["speedup"] = total["speculative_tokens_per_s"] / total["plain_tokens_per_s"]
    total["num_identical"] = sum(answer.identical for answer in answered)
    total["identical"] = total["num_identical"] == len(answered)
    total["num_right"], total["num_known"] = sum(known), len(known)
    return total


def save_images(images: Seq[Shown], folder: Path) -> None:
    """Write the images as PNG. Raises `ConfigError` where that would replace a file of another origin."""
    about = PngInfo()
    about.add_text("Software", COMMAND)
    places = [folder / f"{shown.name.replace(' ', '-')}.png" for shown in images]
    for place in places:
        check_out(place, lambda head: COMMAND in head)
    for place, shown in zip(places, images, strict=True):
        encoded = io.BytesIO()
        shown.image.save(encoded, format="PNG", pnginfo=about)
        write_bytes(place, encoded.getvalue())


def show(console: Console, llm: LLM, drafter: str, answered: Seq[Answered]) -> None:
    """Print a table for each image, and the totals."""
    images = list({id(one.shown): one.shown for one in answered}.values())
    for shown in images:
        console.rule(f"[bold]{escape(shown.name)}[/bold]", align="left", style="dim")
        if shown.description:
            console.print(f"[dim]{escape(shown.description)}[/dim]", soft_wrap=True)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("Question and answer", "Plain\ntok/s", "Spec.\ntok/s", "Tokens\na pass", "Same", "Right"):
            table.add_column(heading, justify="left" if heading.startswith("Q") else "right", overflow="fold")
        for one in answered:
            if one.shown is shown:
                table.add_row(*_row(one))
        console.print(table)
    total = totals(answered)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("All questions", "tok/s", "Seconds", "Vision", "Prefill", "Draft", "Verify", "Rest"):
        table.add_column(heading, justify="left" if heading == "All questions" else "right")
    for side, label in (("plain", "plain"), ("speculative", "with speculation")):
        split = [f"{value:.2f}" for value in total[f"{side}_split"].values()]
        table.add_row(label, f"{total[f'{side}_tokens_per_s']:.1f}", f"{total[f'{side}_seconds']:.2f}", *split)
    console.print(table)
    right = f", {total['num_right']} of {total['num_known']} were right" if total["num_known"] else ""
    console.print(
        f"With the [bold]{escape(drafter)}[/bold] drafter {escape(llm.loaded.name)} decoded {total['speedup']:.2f}x as "
        f"fast as plain decoding; {total['num_identical']} of {len(answered)} answers were token-identical{right} "
        f"(numerics: {llm.numerics}).",
        soft_wrap=not console.is_terminal,
    )


def _row(one: Answered) -> list[str]:
    text = one.speculative.completion.text.strip()
    other = "" if one.identical else f"\n[red]plain: {escape(one.plain.completion.text.strip())}[/red]"
    marks = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
    return [
        f"{escape(one.query.text)}\n[bold]{escape(text)}[/bold]{other}",
        f"{one.plain.tokens_per_s:.1f}",
        f"{one.speculative.tokens_per_s:.1f}",
        f"{one.speculative.completion.mean_acceptance_length:.2f}",
        marks[one.identical],
        marks[one.right],
    ]
