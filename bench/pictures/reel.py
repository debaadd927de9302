"""A moving picture as one SVG file: nothing is loaded, nothing runs, and each part is seen for its seconds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

REST_S = 4.0  # at the end of a loop
BAR = 37  # the height of a window's title
COLOURS = {  # light, dark; those of tokens are near the ones of the chat page
    "paper": ("#ffffff", "#14171b"), "bar": ("#f5f6f8", "#1d2127"), "line": ("#d5d9df", "#363d46"),
    "default": ("#1b1f24", "#e6e9ed"), "soft": ("#59626e", "#a3adb9"),
    "black": ("#c3c9d1", "#3f4750"), "brightblack": ("#59626e", "#a3adb9"), "white": ("#59626e", "#c9ced5"),
    "red": ("#b3261e", "#ff8a80"), "green": ("#007a4d", "#3fd0a8"), "brown": ("#b45309", "#f3b83d"),
    "blue": ("#0060a8", "#6cb8f0"), "magenta": ("#9b3d78", "#e39ac6"), "cyan": ("#1257c9", "#7fc8f5"),
}  # fmt: skip
"""By the names of `pyte`, which calls yellow brown, and by those of the window around the terminal."""


def _style() -> str:
    light, dark = ("".join(f"--{name}:{pair[at]};" for name, pair in COLOURS.items()) for at in (0, 1))
    inks = "".join(f".{name}{{fill:var(--{name})}}" for name in COLOURS)
    mono = 'ui-monospace,"SF Mono","Cascadia Mono","DejaVu Sans Mono",Menlo,Consolas,monospace'
    return (
        f"svg{{{light}}}.dark{{display:none}}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}.dark{{display:inline}}.light{{display:none}}}}"
        f"text{{font:14px {mono};white-space:pre}}.bold{{font-weight:700}}.italics{{font-style:italic}}{inks}"
        ".edge{fill:none;stroke:var(--line)}"
        "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"
    )


@dataclass
class Reel:
    """A window in which things change for so many seconds, then rest, and begin again.

    width, height: of what is in the window, which begins at (0, 0). title: of the window. about: for screen readers,
    what was run and where.
    """

    width: int
    height: int
    title: str
    about: str
    seconds: float
    _groups: list[str] = field(default_factory=list)
    _steps: list[str] = field(default_factory=list)
    _named: dict[str, str] = field(default_factory=dict)

    def show(self, states: Sequence[tuple[float, str]], theme: str = "") -> None:
        """Show one element after the other, each from its second on; the first one is at 0, and "" shows nothing.

        They lie side by side, and a step moves the next one into the picture: one animation for all. The last one lies
        there by itself, and is what is seen where motion is not wanted. theme: "light" or "dark", or "" for both.
        """
        given = f' class="{theme}"' if theme else ""
        if len(states) > 1:
            whole, name = self.seconds + REST_S, f"s{len(self._steps)}"
            steps = [
                f"{since / whole:.2%}{{transform:translateX({-at * self.width}px)}}"
                for at, (since, _) in enumerate(states, 1 - len(states))
            ]
            self._steps.append(f"@keyframes {name}{{{''.join(steps)}}}")
            given += f' style="animation:{name} {whole:.2f}s step-end infinite"'
        placed = [
            f'<g transform="translate({at * self.width})">{one}</g>' if at else one
            for at, (_, one) in enumerate(states, 1 - len(states))
            if one
        ]
        self._groups.append(f"<g{given}>{''.join(placed)}</g>")

    def use(self, element: str, place: str) -> str:
        """An element at a place, written once, however often it is used."""
        name = self._named.setdefault(element, f"e{len(self._named)}")
        return f'<use href="#{name}" {place}/>'

    def say(self, text: str, since: float, until: float, theme: str = "") -> None:
        """Show a remark at the right of the title."""
        place = f'x="{self.width - 16}" y="{24 - BAR}" text-anchor="end"'
        self.show([(0.0, ""), (since, f'<text class="soft" {place}>{escape(text)}</text>'), (until, "")], theme)

    def svg(self) -> str:
        """The picture."""
        width, height = self.width, self.height + BAR
        size = f'width="{width}" height="{height}" viewBox="0 {-BAR} {width} {height}"'
        told = 'role="img" aria-labelledby="title about" xml:space="preserve"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {told}>',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="about">{escape(self.about)}</desc>',
                f"<style>{_style()}{''.join(self._steps)}</style>",
                "<defs>",
                f'<clipPath id="window"><rect y="{-BAR}" width="{width}" height="{height}" rx="9"/></clipPath>',
                *(f'<g id="{name}">{element}</g>' for element, name in self._named.items()),
                "</defs>",
                '<g clip-path="url(#window)">',
                f'<path class="paper" d="M0 0h{width}v{height}H0z"/>',
                f'<path class="bar" d="M0-1v{-BAR}h{width}V-1z"/>',
                f'<path class="line" d="M0-1h{width}v1H0z"/>',
                f'<text class="soft" x="16" y="{24 - BAR}">{escape(self.title)}</text>',
                *self._groups,
                "</g>",
                f'<rect class="edge" x=".5" y="{0.5 - BAR}" width="{width - 1}" height="{height - 1}" rx="8.5"/>',
                "</svg>\n",
            ]
        )
