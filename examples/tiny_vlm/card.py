"""The model card of a packaged vision-language model."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.zoo.packaged import PackagedVlm

_LIMITS = (
    "It knows what it was trained on: drawn shapes, short signs and bar charts of 128 x 128 pixels, and questions "
    "worded as in training. It is no general model, and pictures of the world mean nothing to it.",
    "It is meant to show and to test speculative decoding with pictures, and as an example of how such a model is "
    "made.",
)


def vlm_card(model: PackagedVlm, record: Mapping[str, Any]) -> str:
    """Markdown; what the record does not know is left out.

    record: base_model (hub id), licence, data, training, evaluation (shares of right answers by kind) and provenance,
    all mappings but the first two; limits (a list of sentences).
    """
    name = model.name
    sections = [
        _yaml(model, record),
        f"# {name}\n\n{model.description}.\n\n```bash\n"
        f"paceline pull {name}      # a folder that plain transformers loads\npaceline demo-vlm\n```\n",
        "## What it is\n\n" + _list(_facts(model)),
    ]
    for key, title in (("data", "Data"), ("training", "Training")):
        if record.get(key):
            sections.append(f"## {title}\n\n" + _list(record[key]))
    if record.get("evaluation"):
        sections.append("## Evaluation\n\n" + _table(record["evaluation"]))
    sections.append("## Use and limits\n\n" + "".join(f"- {one}\n" for one in (*_LIMITS, *record.get("limits", ()))))
    if record.get("provenance"):
        sections.append("## How it was made\n\n" + _list(_made(record["provenance"])))
    return "\n".join(sections)


def _yaml(model: PackagedVlm, record: Mapping[str, Any]) -> str:
    base = json.dumps(record.get("base_model", model.base))
    licence = json.dumps(model.licence)
    return (
        f"---\nlibrary_name: transformers\nbase_model: {base}\nlicense: {licence}\npipeline_tag: image-text-to-text\n"
        "tags:\n- speculative-decoding\n- llava\n---\n"
    )


def _facts(model: PackagedVlm) -> dict[str, object]:
    trained = [f"{one.part.file} (times {one.scale:g})" for one in model.adapters]
    return {
        "base": f"{model.base}, decoder layers {', '.join(map(str, model.layers))}",
        "low-rank layers over it": ", then ".join(trained),
        "vision tower and projector": model.eyes.file,
        "parameters once merged": f"{model.parameters:,} in {model.dtype}",
    }


def _table(evaluation: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_number(value)} |\n" for name, value in evaluation.items()]
    return "| measured | value |\n|---|---|\n" + "".join(rows)


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _made(provenance: Mapping[str, Any]) -> dict[str, object]:
    kept = ("paceline", "git_commit", "python", "torch", "transformers", "cpu", "gpu", "time")
    told: dict[str, object] = {key: provenance[key] for key in kept if provenance.get(key) is not None}
    if provenance.get("command"):
        words = [Path(word).name if Path(word).is_absolute() else word for word in provenance["command"]]
        told["command"] = f"`{shlex.join(words)}`"
    return told


def _list(facts: Mapping[str, object]) -> str:
    return "".join(f"- {name.replace('_', ' ')}: {_plain(value)}\n" for name, value in facts.items())


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
