"""What is in a picture: shapes, a printed sign or a bar chart."""

from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 220),
    "yellow": (235, 205, 40),
    "black": (20, 20, 20),
    "gray": (128, 128, 128),
    "teal": (20, 145, 145),
    "brown": (140, 85, 40),
    "orange": (245, 140, 30),
    "purple": (140, 60, 190),
}
SHAPES = ("circle", "rectangle", "triangle", "star", "diamond", "cross")
WORDS = (
    "STOP", "EXIT", "OPEN", "SALE", "CAFE", "BANK", "TAXI", "HOTEL", "PARK", "FOOD",
    "BOOK", "MILK", "RAIN", "SNOW", "BLUE", "GOLD", "FIRE", "LAKE", "MOON", "TREE",
)  # fmt: skip
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)

HELD_OUT = 1 << 41
"""Seeds of scenes from here on are never trained on."""

Colour: TypeAlias = str


@dataclass(frozen=True)
class Thing:
    """A shape in one cell of the 3 x 3 grid; row 0 is the top. dx, dy shift it and scale sizes it, all in cells."""

    shape: str
    colour: Colour
    row: int
    column: int
    scale: float = 0.8
    dx: float = 0.0
    dy: float = 0.0

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return PLACES[self.row][self.column]

    @property
    def name(self) -> str:
        """Colour and shape."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Sign:
    """A printed word or number."""

    text: str
    colour: Colour


@dataclass(frozen=True)
class Bars:
    """A bar chart: colours from left to right, and heights from 1 to 9."""

    colours: tuple[Colour, ...]
    heights: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """One picture. kind tells which of the three it holds; the background is a light grey or tint."""

    kind: Literal["shapes", "sign", "bars"]
    background: tuple[int, int, int]
    things: tuple[Thing, ...] = ()
    sign: Sign | None = None
    bars: Bars | None = None


def make_scene(seed: int) -> Scene:
    """The scene of a seed: three in four show one to four shapes, the rest a sign or a chart."""
    rng = Random(seed)
    background = (rng.randint(220, 255), rng.randint(220, 255), rng.randint(220, 255))
    draw = rng.random()
    if draw < 0.12:
        text = rng.choice(WORDS) if rng.random() < 0.6 else str(rng.randint(0, 99))
        return Scene("sign", background, sign=Sign(text, rng.choice(list(COLOURS))))
    if draw < 0.25:
        count = rng.randint(2, 4)
        heights = tuple(rng.sample(range(1, 10), count))
        return Scene("bars", background, bars=Bars(tuple(rng.sample(list(COLOURS), count)), heights))
    count = rng.choices((1, 2, 3, 4), (2, 3, 3, 2))[0]
    names = rng.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], count)
    cells = rng.sample(range(9), count)
    things = [
        Thing(
            shape,
            colour,
            cell // 3,
            cell % 3,
            rng.uniform(0.6, 0.95),
            rng.uniform(-0.06, 0.06),
            rng.uniform(-0.06, 0.06),
        )
        for (shape, colour), cell in zip(names, sorted(cells), strict=True)
    ]
    return Scene("shapes", background, tuple(things))
