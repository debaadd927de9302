"""What the pictures of results share: colours, style, and a foot that says what was measured where and when."""

import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError
from ..system.files import write_bytes
from .opened import Opened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "osD^vPX*"
GREY = "#555555"
_ROW_OF_LETTERS = 120  # of a legend, in a figure eight inches wide
_FOOT, _LEGEND_ROW = 0.14, 0.2  # inches a line
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.hashsalt": "paceline",
}


def styled(draw: Callable[[Sequence[Opened]], "Figure"]) -> Callable[[Sequence[Opened]], "Figure"]:
    """A picture drawn in our style, whatever the caller's is."""

    @functools.wraps(draw)
    def in_style(results: Sequence[Opened]) -> "Figure":
        with load_matplotlib().rc_context(STYLE):
            return draw(results)

    return in_style


def load_matplotlib():
    """The library, or a `ConfigError` that names the extra to install."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("pictures need matplotlib", fix="pip install 'paceline[viz]'") from None
    return matplotlib


def drawn_by(command: str) -> Callable[[str], bool]:
    """For `files.check_out`: whether a picture is of this command."""
    return lambda head: command in head


def save_figure(figure: "Figure", path: Path, command: str) -> None:
    """Write a picture, whole or not at all, in the format that its name ends with; it says which command drew it."""
    form, held = path.suffix[1:], io.BytesIO()
    # A date in the file would make every copy of the same picture differ.
    metadata = {"Date": None, "Creator": command} if form == "svg" else {"Software": command}
    figure.savefig(held, format=form, dpi=150, metadata=metadata)
    write_bytes(path, held.getvalue())


def new_figure(results: Sequence[Opened], size: tuple[float, float]) -> "tuple[Figure, Axes]":
    """A figure with one panel."""
    figure, (axes,) = new_figures(results, size, 1)
    return figure, axes


def new_figures(results: Sequence[Opened], size: tuple[float, float], panels: int) -> "tuple[Figure, list[Axes]]":
    """A figure with panels below each other and, at its foot, what was measured where and when."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    feet = _feet(results)
    _leave_below(figure, _FOOT * (len(feet) + 0.5))
    figure.text(0.992, 0.05 / size[1], "\n".join(feet), fontsize=7, color=GREY, ha="right", va="bottom")
    return figure, list(axes)


def add_legend(figure: "Figure", axes: "Axes", results: Sequence[Opened]) -> None:
    """What the lines mean, between the picture and its foot; the figure grows by what that takes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), 3, _ROW_OF_LETTERS // (8 + max(map(len, labels)))))
    foot, legend = _FOOT * (len(_feet(results)) + 0.5), _LEGEND_ROW * -(-len(labels) // columns) + 0.15
    width, height = figure.get_size_inches()
    height += legend
    figure.set_size_inches(width, height)
    _leave_below(figure, foot + legend)
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, foot / height), ncols=columns, fontsize=9)


def _leave_below(figure: "Figure", inches: float) -> None:
    """Keep the layout out of a strip at the bottom."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    share = inches / figure.get_size_inches()[1]
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)  # as `new_figures` made it
    engine.set(rect=(0.0, share, 1.0, 1.0 - share))


def _feet(results: Sequence[Opened]) -> list[str]:
    return list(dict.fromkeys(_foot(one) for one in results))


def _foot(one: Opened) -> str:
    origin = cast("dict[str, object]", one.summary.get("provenance") or {})
    machine = str(origin.get("gpu") or origin.get("cpu") or "unknown hardware")
    count = origin.get("threads")
    threads = f", {count} thread{'' if count == 1 else 's'}" if count and not origin.get("gpu") else ""
    commit = f" ({str(origin['git_commit'])[:7]})" if origin.get("git_commit") else ""
    version = f" · paceline {origin['paceline']}{commit}" if origin.get("paceline") else ""
    return f"{one.model} · {machine}{threads} · {str(origin.get('time') or 'undated')[:10]}{version}"


def colour(index: int) -> str:
    """The colour of the series of this number."""
    return PALETTE[index % len(PALETTE)]
