"""Questions about a scene, with their answers, in five kinds that differ in how long the answer is; and easy-VQA's."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

from PIL import Image

from paceline.errors import ConfigError

from .scene import COLOURS, HELD_OUT, SHAPES, WORDS, Bars, Scene, Sign, Thing, make_scene

Kind: TypeAlias = Literal["yes/no", "choice", "short", "caption", "steps"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Question:
    """A question and its only right answer, None where it is not known. kind: one of `KINDS`, or "own"."""

    kind: str
    text: str
    answer: str | None = None


def ask(scene: Scene, kind: Kind, seed: int) -> Question:
    """A question of this kind about the scene."""
    rng = Random(f"{seed} {kind}")
    return Question(kind, *_FORMS[scene.kind][KINDS.index(kind)](scene.sign or scene.bars or scene.things, rng))


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _at(thing: Thing) -> str:
    return ("in the center" if thing.place == "center" else
            f"on the {thing.place}" if thing.place in ("left", "right") else f"at the {thing.place}")  # fmt: skip


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _options(rng: Random, right: str, others: list[str], count: int = 3) -> tuple[str, str]:
    """Choices with letters, and the letter of the right one."""
    options = [right, *rng.sample([other for other in others if other != right], count - 1)]
    rng.shuffle(options)
    letters = "ABCD"
    return " ".join(f"{letters[i]}) {option}" for i, option in enumerate(options)), letters[options.index(right)]


# Shapes

_Things: TypeAlias = tuple[Thing, ...]


def _only(things: _Things, rng: Random, what: str) -> Thing | None:
    """One whose colour or shape no other has."""
    values = [getattr(thing, what) for thing in things]
    alone = [thing for thing in things if values.count(getattr(thing, what)) == 1]
    return rng.choice(alone) if alone else None


def _shapes_yes(things: _Things, rng: Random) -> tuple[str, str]:
    form = rng.randrange(4)
    names = [thing.name for thing in things]
    if form == 0:
        name = rng.choice(names) if rng.random() < 0.5 else f"{rng.choice(list(COLOURS))} {rng.choice(SHAPES)}"
        return f"Is there {_a(name)}?", _yes(name in names)
    if form == 1:
        shapes = [thing.shape for thing in things]
        shape = rng.choice(shapes) if rng.random() < 0.5 else rng.choice(SHAPES)
        return f"Does the image contain {_a(shape)}?", _yes(shape in shapes)
    if form == 2 and len(things) > 1:
        one, other = rng.sample(list(things), 2)
        if one.column != other.column:
            return f"Is the {one.name} left of the {other.name}?", _yes(one.column < other.column)
        return f"Is the {one.name} above the {other.name}?", _yes(one.row < other.row)
    colours = [thing.colour for thing in things]
    colour = rng.choice(colours) if rng.random() < 0.5 else rng.choice(list(COLOURS))
    return f"Is there {_a(colour)} shape?", _yes(colour in colours)


def _shapes_choice(things: _Things, rng: Random) -> tuple[str, str]:
    if rng.random() < 0.5 and (thing := _only(things, rng, "shape")):
        options, letter = _options(rng, thing.colour, list(COLOURS))
        return f"What color is the {thing.shape}? {options}", letter
    thing = rng.choice(things)
    options, letter = _options(rng, thing.shape, list(SHAPES))
    return f"Which shape is {_at(thing)}? {options}", letter


def _shapes_short(things: _Things, rng: Random) -> tuple[str, str]:
    form = rng.randrange(5)
    if form == 0 and (thing := _only(things, rng, "shape")):
        return f"What color is the {thing.shape}?", thing.colour
    if form == 1 and (thing := _only(things, rng, "colour")):
        return f"What is the {thing.colour} shape?", thing.shape
    if form == 2:
        return "How many objects are there?", _NUMBERS[len(things)]
    thing = rng.choice(things)
    if form == 3:
        return f"Where is the {thing.name}?", _at(thing)
    return f"What is {_at(thing)}?", _a(thing.name)


def _shapes_caption(things: _Things, rng: Random) -> tuple[str, str]:
    text = rng.choice(("Describe the image.", "What does the image show?", "Write a caption."))
    return text, f"The image shows {_listed([f'{_a(thing.name)} {_at(thing)}' for thing in things])}."


def _shapes_steps(things: _Things, rng: Random) -> tuple[str, str]:
    lines = [f"{i}. There is {_a(thing.name)} {_at(thing)}." for i, thing in enumerate(things, 1)]
    if rng.random() < 0.5:
        text, found = "How many objects are there? Think step by step.", list(things)
        what = "object" if len(found) == 1 else "objects"
    else:
        colour = rng.choice(things).colour
        text, found = f"How many {colour} objects are there? Think step by step.", []
        found = [thing for thing in things if thing.colour == colour]
        what = f"{colour} object" if len(found) == 1 else f"{colour} objects"
    verb = "is" if len(found) == 1 else "are"
    end = f"So there {verb} {_NUMBERS[len(found)]} {what}. The answer is {_NUMBERS[len(found)]}."
    return text, "\n".join(["Let me look at the objects one by one.", *lines, end])


# Signs


def _sign_yes(sign: Sign, rng: Random) -> tuple[str, str]:
    other = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.randint(0, 99))
    text = sign.text if rng.random() < 0.5 else other
    return f'Does the sign say "{text}"?', _yes(text == sign.text)


def _sign_choice(sign: Sign, rng: Random) -> tuple[str, str]:
    options, letter = _options(rng, sign.colour, list(COLOURS))
    return f"What color is the text? {options}", letter


def _sign_short(sign: Sign, rng: Random) -> tuple[str, str]:
    if rng.random() < 0.3:
        return "What color is the text?", sign.colour
    return rng.choice(("What is written?", "What does the sign say?")), sign.text


def _sign_caption(sign: Sign, rng: Random) -> tuple[str, str]:
    return "Describe the image.", f'The image shows the {_thing(sign)} "{sign.text}" in {sign.colour}.'


def _sign_steps(sign: Sign, rng: Random) -> tuple[str, str]:
    unit = "digits" if sign.text.isdigit() else "letters"
    spelt = [f'{i}. "{character}"' for i, character in enumerate(sign.text, 1)]
    end = f"So the {_thing(sign)} is {sign.text}. The answer is {_NUMBERS[len(sign.text)]}."
    return f"How many {unit} are there? Think step by step.", "\n".join(["Let me spell it.", *spelt, end])


def _thing(sign: Sign) -> str:
    return "number" if sign.text.isdigit() else "word"


# Bar charts


def _bars_yes(bars: Bars, rng: Random) -> tuple[str, str]:
    i, j = rng.sample(range(len(bars.heights)), 2)
    taller = bars.heights[i] > bars.heights[j]
    return f"Is the {bars.colours[i]} bar taller than the {bars.colours[j]} bar?", _yes(taller)


def _bars_choice(bars: Bars, rng: Random) -> tuple[str, str]:
    tallest = bars.colours[bars.heights.index(max(bars.heights))]
    options, letter = _options(rng, tallest, list(bars.colours), min(3, len(bars.colours)))
    return f"Which bar is the tallest? {options}", letter


def _bars_short(bars: Bars, rng: Random) -> tuple[str, str]:
    form = rng.randrange(3)
    if form == 0:
        return "How many bars are there?", _NUMBERS[len(bars.heights)]
    if form == 1:
        return "Which bar is the shortest?", f"the {bars.colours[bars.heights.index(min(bars.heights))]} bar"
    return "Which bar is the tallest?", f"the {bars.colours[bars.heights.index(max(bars.heights))]} bar"


def _bars_caption(bars: Bars, rng: Random) -> tuple[str, str]:
    tallest = bars.colours[bars.heights.index(max(bars.heights))]
    named = _listed([f"{_a(colour)} bar" for colour in bars.colours])
    return "Describe the image.", f"The image shows a chart with {named}. The {tallest} bar is the tallest."


def _bars_steps(bars: Bars, rng: Random) -> tuple[str, str]:
    order = sorted(range(len(bars.heights)), key=lambda i: -bars.heights[i])
    lines = [f"{i}. From the left, bar {i} is {colour}." for i, colour in enumerate(bars.colours, 1)]
    ranked = _listed([bars.colours[i] for i in order])
    end = f"From tallest to shortest they are {ranked}. The answer is {bars.colours[order[0]]}."
    return "Which bar is the tallest? Think step by step.", "\n".join(["Let me look at the bars.", *lines, end])


_FORMS: Mapping[str, tuple[Callable[..., tuple[str, str]], ...]] = {
    "shapes": (_shapes_yes, _shapes_choice, _shapes_short, _shapes_caption, _shapes_steps),
    "sign": (_sign_yes, _sign_choice, _sign_short, _sign_caption, _sign_steps),
    "bars": (_bars_yes, _bars_choice, _bars_short, _bars_caption, _bars_steps),
}
"""Functions of a scene's content and of chance, in the order of `KINDS`."""


def scene_suite(per_kind: int = 60, first: int = HELD_OUT) -> list[tuple[Scene, Question]]:
    """Questions of every kind about the scenes from seed `first` on, one for each scene, the kinds taking turns."""
    scenes = [(seed, make_scene(seed)) for seed in range(first, first + per_kind * len(KINDS))]
    return [(scene, ask(scene, KINDS[n % len(KINDS)], seed)) for n, (seed, scene) in enumerate(scenes)]


# easy-VQA (vzhou842/easy-VQA), unpacked


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
