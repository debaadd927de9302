"""The risk-coverage curve as a picture: what is won by trusting the small model, and what it costs."""

from pathlib import Path

from ..eval.canvas import GREY, PALETTE, STYLE, load_matplotlib, save_figure
from .bound import upper_bound
from .calibration import Calibration


def draw(calibration: Calibration, path: Path) -> None:
    """Write the picture, in the format that the name ends with. Raises `ConfigError` without matplotlib."""
    matplotlib = load_matplotlib()
    from matplotlib.figure import Figure

    choice = calibration.choose()
    points, n = calibration.curves[choice.signal], calibration.n
    covered = [100 * point.covered / n for point in points]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.4), layout="constrained")
        axes = figure.add_subplot()
        seen = [100 * point.differ / n for point in points]
        bound = [100 * upper_bound(point.differ, n, choice.confidence) for point in points]
        axes.step(covered, seen, where="post", color=PALETTE[0], marker=".", label="differ, seen")
        told = f"upper bound, {100 * choice.confidence:g}%"
        axes.step(covered, bound, where="post", color=PALETTE[1], linestyle="--", label=told)
        axes.axhline(100 * choice.max_disagreement, color=GREY, linewidth=1, label="promised")
        here = (100 * choice.coverage, 100 * choice.differ)
        axes.plot(*here, "o", color=PALETTE[5], label=f"{choice.signal} ≥ {choice.threshold:.4g}")
        axes.set_ylim(0, max(2.5 * 100 * choice.max_disagreement, 1.2 * max(seen)))
        axes.set_xlim(0, 100)
        axes.set_xlabel("answered by the small model alone, % of all prompts")
        axes.set_ylabel("answered alone and differently, %")
        axes.set_title(f"{calibration.small.name} before {calibration.large.name}, {n} prompts")
        axes.legend(loc="upper left")
        save_figure(figure, path, "paceline calibrate")
