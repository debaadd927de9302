"""Scenes drawn from a seed: shapes, a printed sign or a bar chart, so that every answer about them is known."""

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

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

SIZE = 128
"""Pixels in width and height."""

HELD_OUT = 1 << 41
"""Seeds of scenes from here on are never trained on."""


@dataclass(frozen=True)
class Thing:
    """A shape in one cell of the 3 x 3 grid; row 0 is the top. dx, dy shift it and scale sizes it, all in cells."""

    shape: str
    colour: str
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
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Sign:
    """A printed word or number."""

    text: str
    colour: str


@dataclass(frozen=True)
class Bars:
    """A bar chart: colours from left to right, and heights from 1 to 9."""

    colours: tuple[str, ...]
    heights: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """The content of one image. kind: which of the three it holds; the background is a light grey or tint."""

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
    chance = ((0.6, 0.95), (-0.06, 0.06), (-0.06, 0.06))  # of scale, dx and dy
    things = [
        Thing(shape, colour, cell // 3, cell % 3, *(rng.uniform(*span) for span in chance))
        for (shape, colour), cell in zip(names, sorted(cells), strict=True)
    ]
    return Scene("shapes", background, tuple(things))


def render(scene: Scene, size: int = SIZE) -> Image.Image:
    """The image, RGB, `size` x `size`; drawn at twice the size and shrunk, so that edges are smooth."""
    canvas = Image.new("RGB", (2 * size, 2 * size), scene.background)
    pen = ImageDraw.Draw(canvas)
    for thing in scene.things:
        pen.polygon(outline(thing, 2 * size), fill=COLOURS[thing.colour])
    if scene.sign is not None:
        _draw_sign(pen, scene.sign, 2 * size)
    if scene.bars is not None:
        _draw_bars(pen, scene.bars, 2 * size)
    return canvas.resize((size, size), Image.Resampling.LANCZOS)


def outline(thing: Thing, size: int) -> list[tuple[float, float]]:
    """Corners of a shape in pixels of a `size` x `size` image; a circle gets 40 of them."""
    cell = size / 3
    x, y = (thing.column + 0.5 + thing.dx) * cell, (thing.row + 0.5 + thing.dy) * cell
    r = thing.scale * cell / 2

    def around(count: int, radii: tuple[float, ...] = (1.0,), turn: float = -0.25) -> list[tuple[float, float]]:
        angles = [2 * math.pi * (i / count + turn) for i in range(count)]
        return [
            (x + r * radii[i % len(radii)] * math.cos(a), y + r * radii[i % len(radii)] * math.sin(a))
            for i, a in enumerate(angles)
        ]

    if thing.shape == "circle":
        return around(40)
    if thing.shape == "triangle":
        return around(3)
    if thing.shape == "diamond":
        return [(x, y - r), (x + 0.7 * r, y), (x, y + r), (x - 0.7 * r, y)]
    if thing.shape == "star":
        return around(10, (1.0, 0.42))
    if thing.shape == "cross":
        t = 0.3 * r
        corners = [(-t, -r), (t, -r), (t, -t), (r, -t), (r, t), (t, t), (t, r), (-t, r), (-t, t), (-r, t), (-r, -t)]
        return [(x + dx, y + dy) for dx, dy in [*corners, (-t, -t)]]
    assert thing.shape == "rectangle", thing.shape
    w, h = (r, 0.65 * r) if (thing.row + thing.column) % 2 else (0.8 * r, 0.8 * r)
    return [(x - w, y - h), (x + w, y - h), (x + w, y + h), (x - w, y + h)]


def _draw_sign(pen: ImageDraw.ImageDraw, sign: Sign, size: int) -> None:
    font = ImageFont.load_default(size * 0.9 / max(3, len(sign.text)) * 1.25)
    pen.text((size / 2, size / 2), sign.text, fill=COLOURS[sign.colour], font=font, anchor="mm")


def _draw_bars(pen: ImageDraw.ImageDraw, bars: Bars, size: int) -> None:
    count, floor = len(bars.heights), size * 0.95
    step = size / count
    for i, (colour, height) in enumerate(zip(bars.colours, bars.heights, strict=True)):
        left = (i + 0.2) * step
        pen.rectangle((left, floor - height * size * 0.1, left + 0.6 * step, floor), fill=COLOURS[colour])
    pen.line((0, floor, size, floor), fill=(0, 0, 0), width=size // 64)
