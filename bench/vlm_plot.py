"""The picture of `vlm_windows`: speed-up and acceptance by kind of answer, a panel for each drafter."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from paceline.eval.plots import STYLE, colour, load_matplotlib
from paceline.system.provenance import provenance


def draw_windows(rows: Seq[Mapping[str, Any]], folder: Path, model: str) -> list[Path]:
    """Write windows.png and windows.svg. Raises `ConfigError` where matplotlib is missing."""
    matplotlib = load_matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = _figure(rows, model)
        files = [folder / f"windows.{suffix}" for suffix in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _figure(rows: Seq[Mapping[str, Any]], model: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    kinds = list(dict.fromkeys(row["class"] for row in rows))
    sides = [side for side in dict.fromkeys(row["window"] for row in rows) if side != "none"]
    figure = Figure(figsize=(10.0, 1.2 + 2.9 * len(drafters)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(drafters), 2, squeeze=False, width_ratios=[3, 2])
    thick = 0.84 / len(sides)
    for (speeds, accepted), drafter in zip(panels, drafters, strict=True):
        mine = {(row["class"], row["window"]): row for row in rows if row["drafter"] == drafter}
        for index, side in enumerate(sides):
            shift = thick * (index - (len(sides) - 1) / 2)
            at = [place + shift for place, kind in enumerate(kinds) if (kind, side) in mine]
            shown = [mine[kind, side] for kind in kinds if (kind, side) in mine]
            name = f"window {side}" if side.isdigit() else side
            speeds.bar(at, [one["decode_quiet"] for one in shown], thick * 0.92, color=colour(index), label=name)
            for x, one in zip(at, shown, strict=True):
                speeds.plot([x, x], [one["decode"]["low"], one["decode"]["high"]], color="black", linewidth=0.8)
                speeds.plot([x], [one["decode"]["median"]], color="black", marker="_", markersize=4)
            heights = [one["acceptance"] or 0.0 for one in shown]
            accepted.bar(at, heights, thick * 0.92, color=colour(index))
        speeds.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
        speeds.set_ylabel("speed-up, decoding")
        speeds.set_title(f"{drafter}: over plain decoding")
        accepted.set_ylabel("accepted of drafted")
        accepted.set_ylim(0, 1.03)
        accepted.set_title(f"{drafter}: acceptance")
        for axes in (speeds, accepted):
            axes.set_xticks(range(len(kinds)), kinds)
            axes.grid(False, axis="x")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)), fontsize=9)
    origin = provenance()
    machine = str(origin.get("gpu") or origin.get("cpu") or "unknown hardware")
    told = "bars: at the medians of rounds; black: by the clock, median and 95% interval"
    figure.suptitle(f"{model} · {machine} · {told}", fontsize=7, x=0.99, ha="right")
    return figure
