"""The trained model as a packaged one: its files, `model.json` with their hashes, the record and the card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline_zoo.whole import ABOUT, read_model

from paceline.methods.heads.card import acceptance_table, card, fact_list, front_matter
from paceline.system.files import write_text
from paceline.system.provenance import provenance, sha256_of

_DESCRIPTION = "a small hybrid that continues Python, with an MTP module: layers of gated delta nets and of attention"
_LIMITS = (
    "It writes what looks like Python and is wrong. It is meant to show and to test speculative decoding of hybrids.",
    "A pass of so small a model costs less than drafting: the cost model drafts nothing, hence `--policy fixed`.",
    "The MTP module was trained on the model's own distribution, three steps deep; it fits no other model.",
    "Greedy answers of so small a model soon repeat themselves, and what repeats is easy to draft; the agreement on "
    "held-out text does not depend on that.",
    "Files that were trained on resemble those that were held out: both come from the same packages.",
)


def package(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
    """Copy the folder of a model to `out`/model and describe it. record: data, training and acceptance."""
    shutil.copytree(folder, out / "model", dirs_exist_ok=True)
    files = sorted(path for path in (out / "model").iterdir())
    config = json.loads((folder / "config.json").read_text())
    about = {
        "paceline_model": 1, "description": _DESCRIPTION, "licence": "Apache-2.0", "parameters": record["parameters"],
        "files": {path.name: sha256_of(path) for path in files},
    }  # fmt: skip
    write_text(out / ABOUT, json.dumps(about, indent=2) + "\n")
    command = ["python", "-m", "examples.tiny_hybrid", "train", "RUN", "--steps", record["training"]["steps"]]
    record = {**record, "provenance": {**provenance(), "command": command}}
    write_text(out / "training.json", json.dumps(record, indent=2) + "\n")
    name = read_model(out).name
    facts = {
        "architecture": f"{config['model_type']}, layers {', '.join(config['layer_types'])}, and one MTP module",
        "parameters": f"{record['parameters']:,}, of which {record['parameters_mtp']:,} in the MTP module, in bfloat16",
        "sizes": ", ".join(f"{key} {config[key]}" for key in ("hidden_size", "intermediate_size", "vocab_size")),
        "tokenizer": "byte-level BPE, trained on the same files",
    }
    introduction = (
        f"# {name}\n\n{_DESCRIPTION[0].upper()}{_DESCRIPTION[1:]}.\n\n```bash\n"
        f"paceline generate {name} 'def mean(values):' --drafter mtp --policy fixed -k 3\n```"
    )
    measured = acceptance_table(record["acceptance"])
    front = front_matter({"licence": "Apache-2.0"}, "transformers", "text-generation", "mtp")
    write_text(out / "README.md", card(front, introduction, fact_list(facts), record, measured, _LIMITS))
