"""The demo with images: questions about drawn scenes, or about your image, answered plainly and with speculation."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from PIL import Image
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline import LLM, SamplingParams
from paceline.engine.output import RequestOutput
from paceline.errors import ConfigError
from paceline.methods import DraftModel

from .questions import KINDS, Question, ask
from .scene import HELD_OUT, make_scene, render

_FIRST_SEED = HELD_OUT + 1_000_000
"""Scenes from here on were neither trained on nor used in an evaluation."""


@dataclass(frozen=True)
class Shown:
    """An image, a description of what is in it (empty where that is not known), and the questions about it."""

    name: str
    image: Image.Image
    description: str
    queries: tuple[Question, ...]


@dataclass(frozen=True)
class Answered:
    """One question, answered both ways."""

    shown: Shown
    query: Question
    plain: RequestOutput
    speculative: RequestOutput

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def right(self) -> bool | None:
        """Whether the answer is the known one."""
        return None if self.query.answer is None else self.speculative.text.strip() == self.query.answer

    def as_dict(self) -> dict[str, Any]:
        return {
            "image": self.shown.name,
            "description": self.shown.description or None,
            **asdict(self.query),
            "right": self.right,
            "identical": self.identical,
            "plain": _as_dict(self.plain),
            "speculative": _as_dict(self.speculative),
        }


def _seconds(output: RequestOutput) -> float:
    """From the question to the last token."""
    return output.metrics.vision + output.metrics.prefill + output.metrics.decode


def _tokens_per_s(output: RequestOutput) -> float:
    """Decoding speed, without the prefill of image and question."""
    return len(output.token_ids) / output.metrics.decode if output.metrics.decode else 0.0


def _as_dict(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "tokens": len(output.token_ids),
        "tokens_per_s": _tokens_per_s(output),
        "seconds": _seconds(output),
        "mean_acceptance_length": output.outputs[0].mean_acceptance_length,
        "split": asdict(output.metrics),
    }


def scenes(count: int, seed: int = 0) -> list[Shown]:
    """`count` scenes with a question of every kind each; the kinds of scene take turns."""
    wanted, found = ("shapes", "bars", "sign", "shapes"), list[Shown]()
    at = _FIRST_SEED + 1000 * seed
    while len(found) < count:
        scene = make_scene(at)
        if scene.kind == wanted[len(found) % len(wanted)]:
            queries = tuple(ask(scene, kind, at) for kind in KINDS)
            caption = next(str(one.answer) for one in queries if one.kind == "caption")
            found.append(Shown(f"scene {at - _FIRST_SEED}", render(scene), caption, queries))
        at += 1
    return found


def answer_both_ways(llm: LLM, images: Sequence[Shown], params: SamplingParams) -> Iterator[Answered]:
    """Answer every question plainly and with speculation; the two take turns, image by image.

    The vision features are dropped before each turn, so that each side encodes an image once, with its first question.
    Raises `ConfigError` for a model without a vision tower.
    """
    if llm.loaded.vision is None:
        raise ConfigError("this model cannot read images", got=llm.loaded.name, fix="take a vision-language model")
    sides = (llm.plain(), llm)
    for side in sides:  # the first passes pay for memory and kernels that later ones have
        _answer(side, images[0].image, images[0].queries[0], replace(params, max_tokens=min(12, params.most_tokens)))
    for shown in images:
        answers: list[list[RequestOutput]] = []
        for side in sides:
            llm.runner.images.features.clear()
            llm.runner.prefixes.clear()
            if isinstance(llm.decoder.drafter, DraftModel):
                llm.decoder.drafter.runner.images.features.clear()
                llm.decoder.drafter.runner.prefixes.clear()
            answers.append([_answer(side, shown.image, query, params) for query in shown.queries])
        for query, plain, speculative in zip(shown.queries, *answers, strict=True):
            yield Answered(shown, query, plain, speculative)


def _answer(side: LLM, image: Image.Image, query: Question, params: SamplingParams) -> RequestOutput:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": query.text}]
    return side.generate([{"role": "user", "content": parts}], params)[0]


def totals(answered: Sequence[Answered]) -> dict[str, Any]:
    """Tokens per second of each side over all questions, and how many answers were identical and right."""
    total: dict[str, Any] = {}
    for name, sides in (("plain", [a.plain for a in answered]), ("speculative", [a.speculative for a in answered])):
        tokens = sum(len(side.token_ids) for side in sides)
        total[f"{name}_tokens_per_s"] = tokens / max(sum(side.metrics.decode for side in sides), 1e-9)
        total[f"{name}_seconds"] = sum(map(_seconds, sides))
        parts = ("vision", "prefill", "draft", "verify", "rest")
        total[f"{name}_split"] = {part: sum(getattr(side.metrics, part) for side in sides) for part in parts}
    known = [answer.right for answer in answered if answer.right is not None]
    total["speedup"] = total["speculative_tokens_per_s"] / total["plain_tokens_per_s"]
    total["num_identical"] = sum(answer.identical for answer in answered)
    total["identical"] = total["num_identical"] == len(answered)
    total["num_right"], total["num_known"] = sum(known), len(known)
    return total


def show(console: Console, llm: LLM, drafter: str, answered: Sequence[Answered]) -> None:
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
    text = one.speculative.text.strip()
    other = "" if one.identical else f"\n[red]plain: {escape(one.plain.text.strip())}[/red]"
    marks = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
    return [
        f"{escape(one.query.text)}\n[bold]{escape(text)}[/bold]{other}",
        f"{_tokens_per_s(one.plain):.1f}",
        f"{_tokens_per_s(one.speculative):.1f}",
        f"{one.speculative.outputs[0].mean_acceptance_length:.2f}",
        marks[one.identical],
        marks[one.right],
    ]
