"""Plots of a run: the estimated accepted length against the tokens seen, and against the size of the data.

curve.json holds the numbers, curve.png the plot where matplotlib is installed.

    runs     one for each fraction of the data: points (answer tokens seen, estimate) of its evaluations
    sizes    one for each finished run: (answer tokens of its data, estimate at its end, measured length at greedy)
"""

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

from ..system.files import read_json, write_bytes, write_text
from .log import read_log
from .run_folder import understood

_RUN = re.compile(r"train(-[0-9.e-]+)?")


def numbers(out: Path) -> dict[str, Any]:
    """What a run's folder knows so far."""
    runs, sizes = dict[str, Any](), list[dict[str, Any]]()
    for folder in sorted(out.glob("train*")):
        if not _RUN.fullmatch(folder.name):
            continue
        name = folder.name.removeprefix("train").removeprefix("-") or "1"
        lines = read_log(folder)
        points = [[line["tokens"], line["accepted_length"]] for line in lines if line["event"] == "evaluation"]
        if points:
            runs[name] = points
        made = [out / (kind if name == "1" else f"{kind}-{name}") / "training.json" for kind in ("head", "draft")]
        record = next((one for one in made if one.exists()), None)
        if record is not None and points:
            trained = read_json(record, "the record")
            with understood(f"the record {str(record)!r}", f"remove {str(record.parent)!r}, and train again"):
                measured = {
                    f"{trial['name']}, temperature {trial['params']['temperature']:g}": trial["result"][
                        "mean_acceptance_length"
                    ]
                    for trial in trained.get("acceptance", [])
                }
                size = {"answer_tokens": trained["data"]["answer tokens"], "estimate": points[-1][1]}
            sizes.append({"fraction": float(name), **size, "measured": measured})
    return {"runs": runs, "sizes": sorted(sizes, key=lambda size: size["fraction"])}


def draw(out: Path) -> Path | None:
    """Write curve.json, and curve.png where it can be drawn; returns the plot's path."""
    found = numbers(out)
    write_text(out / "curve.json", json.dumps(found, indent=1) + "\n")
    if not found["runs"]:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    sizes = found["sizes"] if len(found["sizes"]) > 1 else []
    figure = Figure((11 if sizes else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if sizes else 1, squeeze=False)[0]
    for name, points in sorted(found["runs"].items(), key=lambda run: float(run[0])):
        seen, estimate = zip(*points, strict=True)
        axes[0].plot(seen, estimate, marker="o", markersize=3, label=f"{float(name):.0%} of the data")
    axes[0].set(xlabel="answer tokens seen", ylabel="estimated accepted length")
    if sizes:
        tokens = [size["answer_tokens"] for size in sizes]
        axes[1].plot(tokens, [size["estimate"] for size in sizes], marker="o", label="estimate on held-out answers")
        for what in dict.fromkeys(name for size in sizes for name in size["measured"]):
            both = [(s["answer_tokens"], s["measured"][what]) for s in sizes if what in s["measured"]]
            axes[1].plot(*zip(*both, strict=True), marker="s", linestyle="--", label=what)
        axes[1].set(xlabel="answer tokens of the data", ylabel="accepted length", xscale="log")
    for one in axes:
        one.grid(alpha=0.3)
        one.legend(fontsize=8)
    path = out / "curve.png"
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    write_bytes(path, drawn.getvalue())
    return path
