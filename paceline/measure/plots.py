"""Plots of benchmark results: each function takes results and returns a figure, or raises `NoData` with the reason.

`draw` writes all of them in one style. Colours are Okabe and Ito's, for colour-blind readers.
"""

import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ..errors import ConfigError
from ..system.files import check_out, write_bytes
from .results import SavedResults, SavedRun, SavedSpeedup, short_name, version_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
MARKERS = "osD^vPX*"
GREY = "#555555"
_ROW_OF_LETTERS = 120  # of a legend, in a figure eight inches wide
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
_CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind figures that a line would cross
_COMMAND = "paceline plot"
PlotFormat: TypeAlias = Literal["png", "svg"]


class NoData(Exception):
    """These results do not have the data for a plot; the message is the reason."""


def load_matplotlib():
    """The library, or a `ConfigError` that names the extra to install."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib", fix="pip install 'paceline[plots]'") from None
    return matplotlib


def save_figure(figure: "Figure", path: Path, command: str) -> None:
    """Write a plot atomically, in the format of its file name. Its metadata name the command that drew it."""
    form, held = path.suffix[1:], io.BytesIO()
    # A date in the file would make every copy of the same plot differ.
    metadata = {"Date": None, "Creator": command} if form == "svg" else {"Software": command}
    figure.savefig(held, format=form, dpi=150, metadata=metadata)
    write_bytes(path, held.getvalue())


def new_figure(height: float) -> "tuple[Figure, Axes]":
    """A figure eight inches wide that needs no screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    return figure, figure.subplots()


def speedup_by_category(results: Sequence[SavedResults]) -> "Figure":
    """Speed-up over plain decoding for each category and overall, with confidence intervals."""
    series = [(label, run) for label, run in _runs(results) if run.categories or run.speedup]
    if not series:
        raise NoData("no run has a speed-up")
    timed = (name for _, run in series for name, outcome in run.categories.items() if outcome.speedup is not None)
    rows = [*dict.fromkeys(timed), *["all"] * any(run.speedup for _, run in series)]
    thick = 0.8 / len(series)
    figure, axes = new_figure(2.2 + max(0.42, 0.24 * len(series)) * len(rows))
    for index, (label, run) in enumerate(series):
        bounds = {
            name: _bounds(outcome)
            for name, outcome in {**run.categories, "all": run}.items()
            if outcome.speedup is not None
        }
        at = [row + thick * (index - (len(series) - 1) / 2) for row, name in enumerate(rows) if name in bounds]
        shown = [bounds[name] for name in rows if name in bounds]
        axes.barh(at, [value for value, _, _ in shown], thick * 0.9, color=_style(index)["color"], label=label)
        for y, (value, low, high) in zip(at, shown, strict=True):
            if high > low:
                axes.plot([low, high], [y, y], color="black", linewidth=1.2, marker="|", markersize=5)
            axes.annotate(
                f"{value:.2f}x", (high, y), (5, 0), textcoords="offset points", va="center", fontsize=8, bbox=_CLEAR
            )
    axes.axvline(1.0, color="black", linewidth=1.2, linestyle="--")
    axes.annotate("plain", (1.0, 1.0), (3, 2), ("data", "axes fraction"), "offset points", fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.grid(False, axis="y")
    return _labelled(
        figure, axes, results, "Speed-up by category", "speed-up over plain decoding (times), with confidence interval"
    )


def acceptance_by_position(results: Sequence[SavedResults]) -> "Figure":
    """How often the token at each position is accepted, among the rounds with such a draft, and their number."""
    series = [(label, run) for label, run in _runs(results) if run.acceptance]
    if not series:
        raise NoData("no run has an acceptance by position")
    figure, axes = new_figure(5.2)
    for index, (label, run) in enumerate(series):
        heights = [float("nan") if value is None else value for value in run.acceptance]
        axes.plot(range(1, len(heights) + 1), heights, **_style(index), label=label)
        for place, (height, count) in enumerate(zip(heights, run.rounds, strict=False), start=1):
            axes.annotate(f"{count}", (place, height), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    longest = max(len(run.acceptance) for _, run in series)
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(range(1, longest + 1))
    title, position = "Acceptance by position", "position in the draft (tokens)"
    return _labelled(figure, axes, results, title, position, "accepted (share of the rounds that drafted so far)")


def pass_times(results: Sequence[SavedResults]) -> "Figure":
    """T(n)/T(1): the time of a pass over n rows relative to one row, and the time of reading the weights."""
    series = [(saved, saved.pass_times) for saved in results if saved.pass_times.get(1)]
    if not series:
        raise NoData("no result has pass_times with one row; `paceline doctor --json` measures them")
    figure, axes = new_figure(5.2)
    for index, (saved, times) in enumerate(series):
        label, style = f"{saved.model}, T(1) = {1e3 * times[1]:.3g} ms", _style(index)
        axes.plot(list(times), [t / times[1] for t in times.values()], **style, label=label)
        if saved.floor_s:
            label = f"floor: weights read once, {1e3 * saved.floor_s:.3g} ms"
            axes.axhline(saved.floor_s / times[1], color=style["color"], linestyle=":", label=label)
    _count_powers(axes, sorted({n for _, times in series for n in times}))
    title = "Cost of verifying n tokens in one pass"
    used = [saved for saved, _ in series]
    return _labelled(figure, axes, used, title, "rows of a pass (tokens)", "time of a pass, T(n)/T(1)")


def speedup_by_batch(results: Sequence[SavedResults]) -> "Figure":
    """Speed-up over the number of sequences decoded side by side, one line for each model and drafter."""
    points: dict[str, list[SavedRun]] = defaultdict(list)
    several = len({saved.model for saved in results}) > 1
    for saved in results:
        for run in saved.runs:
            if run.speedup is not None:
                points[f"{saved.model}, " * several + short_name(run.drafter)].append(run)
    sizes = sorted({run.batch for runs in points.values() for run in runs})
    if len(sizes) < 2:
        raise NoData("fewer than two batch sizes; give results of several")
    figure, axes = new_figure(5.2)
    for index, (label, runs) in enumerate(points.items()):
        runs.sort(key=lambda run: run.batch)
        values, lows, highs = np.array([_bounds(run) for run in runs]).T
        axes.errorbar(
            [run.batch for run in runs],
            values,
            np.maximum(0.0, [values - lows, highs - values]),
            **_style(index),
            capsize=3,
            label=label,
        )
    axes.axhline(1.0, color="black", linewidth=1.2, linestyle="--", label="plain decoding")
    _count_powers(axes, sizes)
    height = "speed-up over plain decoding (times)"
    return _labelled(figure, axes, results, "Speed-up over batch size", "batch size (sequences)", height)


FIGURES = {plot.__name__: plot for plot in (speedup_by_category, acceptance_by_position, pass_times, speedup_by_batch)}


def draw(
    results: Sequence[SavedResults], folder: Path | str, formats: Sequence[PlotFormat] = ("png", "svg")
) -> tuple[list[Path], dict[str, str]]:
    """Write every plot that the results have data for into `folder`; returns the files, and why others are left out.

    Raises `ConfigError` where matplotlib is missing, there is no plot at all, or other files would be replaced.
    """
    figures, left_out = dict[Path, "Figure"](), dict[str, str]()
    matplotlib = load_matplotlib()
    with matplotlib.rc_context(STYLE):
        for name, function in FIGURES.items():
            try:
                figure = function(results)
            except NoData as reason:
                left_out[name] = str(reason)
                continue
            figures |= {Path(folder) / f"{name}.{suffix}": figure for suffix in formats}
        for path in figures:
            check_out(path, _COMMAND)
        for path, figure in figures.items():
            save_figure(figure, path, _COMMAND)
    if not figures:
        raise ConfigError(
            "these results give no plot", got="; ".join(left_out.values()), fix="run `paceline bench` first"
        )
    return list(figures), left_out


# Helpers


def _labelled(
    figure: "Figure", axes: "Axes", results: Sequence[SavedResults], title: str, xlabel: str, ylabel: str = ""
) -> "Figure":
    """Add titles and a legend at the bottom: what was measured where and when, and what the lines mean."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    labels = axes.get_legend_handles_labels()[1]
    legend = figure.legend(
        loc="outside lower left",
        ncols=max(1, min(len(labels), 3, _ROW_OF_LETTERS // (8 + max(map(len, labels))))),
        fontsize=9,
        title="\n".join(dict.fromkeys(map(_foot, results))),
        title_fontsize=7,
        alignment="left",
    )
    legend.get_title().set_color(GREY)
    return figure


def _count_powers(axes: "Axes", counts: Sequence[int]) -> None:
    """A logarithmic x axis with these counts as ticks; y from 0."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def _style(index: int) -> dict[str, Any]:
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)]}


def _foot(saved: SavedResults) -> str:
    origin = saved.provenance
    machine = str(origin.get("gpu") or origin.get("cpu") or "unknown hardware")
    count = origin.get("threads")
    threads = f", {count} thread{'' if count == 1 else 's'}" if count and not origin.get("gpu") else ""
    parts = [saved.model, machine + threads, str(origin.get("time") or "undated")[:10], version_of(origin)]
    return " · ".join(filter(None, parts))


def _runs(results: Sequence[SavedResults]) -> list[tuple[str, SavedRun]]:
    """Each run with a unique label."""
    has_batches = len({run.batch for saved in results for run in saved.runs}) > 1

    def label(saved: SavedResults, run: SavedRun) -> str:
        name = short_name(run.drafter) + f", batch {run.batch}" * has_batches
        return name + f" ({saved.name})" * (len(results) > 1)

    return [(label(saved, run), run) for saved in results for run in saved.runs]


def _bounds(outcome: SavedSpeedup) -> tuple[float, float, float]:
    """A speed-up that is there, and its interval; without one, the speed-up itself."""
    assert outcome.speedup is not None
    low, high = (outcome.speedup if bound is None else bound for bound in (outcome.speedup_low, outcome.speedup_high))
    return outcome.speedup, low, high
