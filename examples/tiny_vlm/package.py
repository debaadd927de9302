"""What was trained, as a folder that `paceline pull` merges with its base, and its model card.

`paceline_zoo.vlm` describes the layout and makes a plain model of it. Weights are kept in
float16: they are small numbers without outliers, for which its 10 bits of fraction are worth more than the range of
bfloat16.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from paceline_zoo.vlm import ABOUT, FORMAT, PackagedVlm, base_fingerprint, merge_vlm, parse_vlm, read_vlm
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ConfigError
from paceline.methods.heads.card import card, fact_list, front_matter
from paceline.system.files import read_json, write_text
from paceline.system.provenance import provenance, sha256_of
from paceline.train.run_folder import understood
from paceline.zoo import DEFAULT_MODEL

from .model import TowerShape, kept_layers, make_model, make_processor

KEPT = torch.float16
_MERGED = "merged-from.txt"
_LORA = re.compile(r"layers\.(\d+)\.(.+)\.lora_([AB])\.default\.weight")
_MODEL_FILES = ("config.json", "generation_config.json", "processor_config.json", "chat_template.jinja")
_LIMITS = (
    "It knows the kind of data it was trained on: drawn shapes, short signs and bar charts of 128 x 128 pixels, and "
    "questions worded as in training. Photographs mean nothing to it.",
    "It is meant to show and to test speculative decoding with images, and as an example of how such a model is made.",
)


@dataclass(frozen=True)
class Trained:
    """The result of a run. lora: peft's parameters by peft's names; scale: alpha over rank. vision: the state of tower
    and projector, None: a sibling's.

    layers: number of evenly spaced layers that are left, None: all. The low-rank layers of the model beside which it is
    packed are applied first.
    """

    lora: Mapping[str, Tensor]
    vision: Mapping[str, Tensor] | None
    scale: float = 2.0
    layers: int | None = None
    tower: TowerShape = field(default_factory=TowerShape)
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])


def package_vlm(
    trained: Trained, out: Path, base_folder: Path, base: str = DEFAULT_MODEL, beside: Path | None = None,
    dtype: str = "bfloat16",
) -> Path:  # fmt: skip
    """Write the folder `out`, its card included, vlm.json last: with it a folder counts as whole.

    base: the name or folder that `pull` will be given; base_folder: the same model here. beside: the packaged model
    whose tower and projector this one shares; its folder must lie beside `out`. Raises `ConfigError`.
    """
    if (beside is None) != (trained.vision is not None) or (beside and beside.resolve().parent != out.resolve().parent):
        raise ConfigError(
            "a model has vision parts of its own, or lies beside the model whose parts it shares", got=str(out)
        )
    out.mkdir(parents=True, exist_ok=True)
    kept, lora = kept_layers(base_folder, trained.layers), short_names(trained.lora)
    (out / ABOUT).unlink(missing_ok=True)
    parameters = _write_model_files(out / "model", base_folder, trained)
    vision_file = "vision.safetensors" if beside is None else f"../{beside.name}/vision.safetensors"
    if trained.vision is not None:
        save_file({n: t.detach().to("cpu", KEPT).contiguous() for n, t in trained.vision.items()}, out / vision_file)
    save_file(lora, out / "lora.safetensors")
    adapters = [_part(out, "lora.safetensors") | {"scale": trained.scale, "layers": list(range(len(kept)))}]
    if beside is not None:
        (first,) = read_vlm(beside).adapters
        file = f"../{beside.name}/lora.safetensors"
        adapters.insert(0, _part(out, file) | {"scale": first.scale, "layers": [first.layers[layer] for layer in kept]})
    description = f"{base} with a vision tower, {len(kept)} layers: a small model for drawn shapes, signs and charts"
    if beside is not None:
        description = f"The draft model of {beside.name}: {len(kept)} layers behind its vision tower and projector"
    about = {
        "paceline_vlm": FORMAT,
        "description": description,
        "licence": trained.record.get("licence", "Apache-2.0"),
        "base": base,
        "base_fingerprint": base_fingerprint(base_folder),
        "layers": kept,
        "vision": _part(out, vision_file),
        "adapters": adapters,
        "dtype": dtype,
        "parameters": parameters,
        "model": {name: sha256_of(out / "model" / name) for name in _MODEL_FILES},
    }
    text = json.dumps(about, indent=2) + "\n"
    _write_record(parse_vlm(out, text.encode()), {"provenance": provenance(), **trained.record})
    write_text(out / ABOUT, text)
    return out


def merge_once(packaged: Path, base_folder: Path, folder: Path) -> None:
    """Merge a packaged model into a plain folder, unless that was done."""
    model, note = read_vlm(packaged), folder / _MERGED
    if note.exists() and note.read_text() == model.sha256:
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    merge_vlm(model, base_folder, folder)
    write_text(note, model.sha256)


def write_record(out: Path, changes: Mapping[str, Any]) -> None:
    """Put these into the folder's training.json, and write its card anew."""
    path = out / "training.json"
    with understood(f"the record {str(path)!r}", "remove it, and run the stage again"):
        record = dict(read_json(path, "the record")) if path.exists() else {}
    _write_record(read_vlm(out), {**record, **changes})


def _write_record(model: PackagedVlm, record: Mapping[str, Any]) -> None:
    write_text(model.folder / "training.json", json.dumps(record, indent=2) + "\n")
    write_text(model.folder / "README.md", vlm_card(model, record))


def short_names(lora: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of peft as layers.I.LINEAR.lora_A and lora_B, in `KEPT`."""
    found: dict[str, Tensor] = {}
    for name, value in lora.items():
        match = _LORA.search(name)
        assert match is not None, name
        found[f"layers.{match[1]}.{match[2]}.lora_{match[3]}"] = value.detach().to("cpu", KEPT).contiguous()
    return found


def _part(out: Path, file: str) -> dict[str, Any]:
    return {"file": file, "sha256": sha256_of(out / file)}


def _write_model_files(folder: Path, base_folder: Path, trained: Trained) -> int:
    """Config, processor and template as transformers writes them, without paths of this machine; returns the size."""
    model = make_model(base_folder, trained.layers, tower=trained.tower)
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch:
        model.config.save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        make_processor(base_folder).save_pretrained(scratch)
        for name in _MODEL_FILES:
            text = (Path(scratch) / name).read_text(encoding="utf-8")
            if name == "config.json":
                config: dict[str, Any] = json.loads(text)
                config["architectures"] = [type(model).__name__]
                config["text_config"].pop("_name_or_path", None)
                text = json.dumps(config, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def vlm_card(model: PackagedVlm, record: Mapping[str, Any]) -> str:
    """README.md from the record of the training; what the record does not know is left out.

    record: base_model (hub id), data, training, evaluation (shares of right answers by kind) and provenance.
    """
    known = {"base_model": record.get("base_model", model.base), "licence": model.licence}
    front = front_matter(known, "transformers", "image-text-to-text")
    facts = {
        "base": f"{model.base}, decoder layers {', '.join(map(str, model.layers))}",
        "low-rank layers over it": ", then ".join(f"{one.file} (times {one.scale:g})" for one in model.adapters),
        "vision tower and projector": model.vision.file,
        "parameters once merged": f"{model.parameters:,} in {model.dtype}",
    }
    introduction = (
        f"# {model.name}\n\n{model.description}.\n\n```bash\npaceline pull {model.name}      # a folder that plain "
        "transformers loads\nmake demo-vlm\n```"
    )
    measured = ""
    if record.get("evaluation"):
        rows = [f"| {name} | {value:.3f} |" for name, value in record["evaluation"].items()]
        measured = "## Evaluation\n\n| measured | value |\n|---|---|\n" + "\n".join(rows)
    return card(front, introduction, fact_list(facts), record, measured, _LIMITS)
