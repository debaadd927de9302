"""What a terminal showed, as a picture."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple, TypeAlias

import pyte
from pyte.screens import Char

from .pace import shortened
from .reel import Reel
from .terminal import COLUMNS, ROWS, Output

WIDTH, HEIGHT, LEFT, TOP = 8.4, 19, 16, 25  # of a cell; where the text of the first one begins
EMPTY = Char(" ")
BUSY = set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏━╸╺")  # of the spinners and bars of `paceline.cli.screen`
DRAWN = set("─━╸╺│┌┐└┘├┤┬┴┼╭╮╯╰■")  # stretched, to meet or to fill its cell
Line: TypeAlias = tuple[Char, ...]


class Frame(NamedTuple):
    """The screen from one second on, as lines of cells."""

    at: float
    lines: tuple[Line, ...]

    @property
    def text(self) -> list[str]:
        """Its lines."""
        return ["".join(cell.data for cell in line).rstrip() for line in self.lines]


class _Screen(pyte.Screen):
    """A screen that knows dim text, by the colour that themes have for it."""

    def select_graphic_rendition(self, *attrs: int, private: bool = False) -> None:
        super().select_graphic_rendition(*(90 if attr == 2 else attr for attr in attrs))


def frames(outputs: Sequence[Output]) -> Iterator[Frame]:
    """The screen after each output that changes it."""
    screen = _Screen(COLUMNS, ROWS)
    stream, lines, last = pyte.ByteStream(screen), [(EMPTY,) * COLUMNS] * ROWS, 0
    before = None
    for at, data, has_cursor in outputs:
        stream.feed(data)
        for y in {*screen.dirty, last}:
            lines[y] = tuple(screen.buffer[y][x] for x in range(COLUMNS))
        screen.dirty.clear()
        last, x = screen.cursor.y, min(screen.cursor.x, COLUMNS - 1)
        if has_cursor:
            lines[last] = (*lines[last][:x], lines[last][x]._replace(reverse=True), *lines[last][x + 1 :])
        if before != lines:
            yield Frame(at, tuple(lines))
        before = [*lines]


def picture(outputs: Sequence[Output], title: str, about: str) -> str:
    """A recording as SVG."""
    shown = list(frames(outputs))
    busy = [any(cell.data in BUSY for line in frame.lines for cell in line) for frame in shown]
    seen, lapses = shortened([frame.at for frame in shown], busy)
    used = 1 + max(y for at in seen.values() for y, line in enumerate(shown[at].text) if line)
    reel = Reel(round(COLUMNS * WIDTH) + 2 * LEFT, TOP + used * HEIGHT, title, about, max(seen))
    for lapse in lapses:
        reel.say(lapse.label, lapse.since, lapse.until)
    for y in range(used):
        states = [(now, drawn(y, shown[at].lines[y])) for now, at in seen.items()]
        changes = [states[0], *(after for before, after in pairwise(states) if after[1] != before[1])]
        if changes != [(0.0, "")]:
            reel.show(changes)
    return reel.svg()


def drawn(y: int, line: Line) -> str:
    """A line of the terminal; "" where it is empty."""
    parts, x = list[str](), 0
    for style, group in groupby(line, lambda cell: cell._replace(data="")):
        cells = [cell.data for cell in group]
        text = "".join(cells)
        if style.reverse or style.bg != "default":
            place = f'x="{LEFT + x * WIDTH:.5g}" y="{TOP + y * HEIGHT - 14}" width="{len(cells) * WIDTH:.5g}"'
            parts.append(f'<rect class="{style.fg if style.reverse else style.bg}" {place} height="{HEIGHT}"/>')
        if inner := text.strip():
            start, width = x + len(text) - len(text.lstrip()), len(cells) - (len(text) - len(inner))
            names = ["paper" if style.reverse else style.fg, *(n for n in ("bold", "italics") if getattr(style, n))]
            stretch = ' lengthAdjust="spacingAndGlyphs"' if set(inner) <= DRAWN else ""
            place = f'x="{LEFT + start * WIDTH:.5g}" y="{TOP + y * HEIGHT}" textLength="{width * WIDTH:.5g}"'
            parts.append(f'<text class="{" ".join(names)}" {place}{stretch}>{escape(inner)}</text>')
        x += len(cells)
    return "".join(parts)
