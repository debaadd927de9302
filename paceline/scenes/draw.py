"""Draw a scene."""

import math

from PIL import Image, ImageDraw, ImageFont

from .scene import COLOURS, Bars, Scene, Sign, Thing

SIZE = 128
"""Pixels in width and height."""


def render(scene: Scene, size: int = SIZE) -> Image.Image:
    """The picture, RGB, `size` x `size`; drawn at twice the size and shrunk, so that edges are smooth."""
    canvas = Image.new("RGB", (2 * size, 2 * size), scene.background)
    pen = ImageDraw.Draw(canvas)
    for thing in scene.things:
        _draw_thing(pen, thing, 2 * size)
    if scene.sign is not None:
        _draw_sign(pen, scene.sign, 2 * size)
    if scene.bars is not None:
        _draw_bars(pen, scene.bars, 2 * size)
    return canvas.resize((size, size), Image.Resampling.LANCZOS)


def outline(thing: Thing, size: int) -> list[tuple[float, float]]:
    """Corners of a shape in pixels of a `size` x `size` picture; a circle gets 40 of them."""
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


def _draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, size: int) -> None:
    pen.polygon(outline(thing, size), fill=COLOURS[thing.colour])


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
