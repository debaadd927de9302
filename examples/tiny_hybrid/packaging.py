"""A small trained model as a packaged one: its files, `model.json` with their hashes, the record and the card."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_zoo.whole import ABOUT, read_model

from paceline.methods.heads.card import acceptance_table, card, fact_list, front_matter
from paceline.system.files import write_text
from paceline.system.provenance import provenance, sha256_of

_LIMITS = (
    "Greedy answers of so small a model soon repeat themselves, and what repeats is easy to draft.",
    "Files that were trained on resemble those that were held out: both come from the same packages.",
)


@dataclass(frozen=True)
class About:
    """What a card says besides what was measured.

    module: whose commands made it. usage: of `paceline generate NAME`. tag: for hubs. limits: before those of all.
    """

    module: str
    description: str
    usage: str
    tag: str
    limits: Sequence[str]


def package(folder: Path, out: Path, about: About, facts: Mapping[str, object], record: Mapping[str, Any]) -> None:
    """Copy the folder of a model to `out`/model and describe it.

    facts: what it is, for the card. record: parameters, data, training and acceptance.
    """
    shutil.copytree(folder, out / "model", dirs_exist_ok=True)
    files = {path.name: sha256_of(path) for path in sorted((out / "model").iterdir())}
    described = {"description": about.description, "licence": "Apache-2.0", "parameters": record["parameters"]}
    write_text(out / ABOUT, json.dumps({"paceline_model": 1, **described, "files": files}, indent=2) + "\n")
    command = ["python", "-m", about.module, "train", "RUN", "--steps", record["training"]["steps"]]
    record = {**record, "provenance": {**provenance(), "command": command}}
    write_text(out / "training.json", json.dumps(record, indent=2) + "\n")
    name = read_model(out).name
    introduction = (
        f"# {name}\n\n{about.description[0].upper()}{about.description[1:]}.\n\n```bash\n"
        f"paceline generate {name} {about.usage}\n```"
    )
    measured = acceptance_table(record["acceptance"])
    front = front_matter({"licence": "Apache-2.0"}, "transformers", "text-generation", about.tag)
    known = {**facts, "tokenizer": "byte-level BPE, trained on the same files"}
    limits = (*about.limits, *_LIMITS)
    write_text(out / "README.md", card(front, introduction, fact_list(known), record, measured, limits))


def sizes(config: Mapping[str, Any], *keys: str) -> str:
    """Some entries of a config.json in words."""
    return ", ".join(f"{key} {config[key]}" for key in keys)
