"""What was trained, as a folder that travels: `zoo.packaged` tells its layout, `zoo.merge` makes a plain model of it.

Weights are kept in float16: they are small numbers without outliers, for which its 10 bits of fraction are worth more
than the range of bfloat16.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import ConfigError
from paceline.schema import validate
from paceline.system.files import read_json, write_text
from paceline.system.provenance import provenance, sha256_of
from paceline.train.run_folder import understood
from paceline.zoo import DEFAULT_MODEL
from paceline.zoo.merge import base_fingerprint, merge_vlm
from paceline.zoo.packaged import ABOUT, FORMAT, PackagedVlm, parse_vlm, read_vlm

from .card import vlm_card
from .shape import TowerShape, kept_layers, make_model, make_processor

KEPT = torch.float16
_OF = "merged-from.txt"
_LORA = re.compile(r"layers\.(\d+)\.(.+)\.lora_([AB])\.default\.weight")
_MODEL_FILES = ("config.json", "generation_config.json", "processor_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Eyes:
    """State of the tower and of the projector."""

    tower: Mapping[str, Tensor]
    projector: Mapping[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """As the model names them."""
        named = {f"vision_tower.{name}": value for name, value in self.tower.items()}
        return named | {f"multi_modal_projector.{name}": value for name, value in self.projector.items()}

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> "Eyes":
        """From what `named` gave, in float32."""
        tower, projector = (
            {name.removeprefix(part): value.float() for name, value in named.items() if name.startswith(part)}
            for part in ("vision_tower.", "multi_modal_projector.")
        )
        return cls(tower, projector)


@dataclass(frozen=True)
class Trained:
    """What a run has to show. lora: peft's parameters by peft's names; scale: alpha over rank. eyes: None: a sibling's.

    layers: number of evenly spaced layers that are left, None: all. over: whether the layers had the low-rank layers
    of the model beside which it is packed in them before.
    """

    lora: Mapping[str, Tensor]
    eyes: Eyes | None
    scale: float = 2.0
    layers: int | None = None
    over: bool = False
    tower: TowerShape = field(default_factory=TowerShape)
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])


def package_vlm(
    trained: Trained,
    out: Path,
    base_folder: Path,
    base: str = DEFAULT_MODEL,
    beside: Path | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Write the folder `out`, its card included, vlm.json last.

    base: name or folder that `pull` or `merge_vlm` will be given; base_folder: the same model here.
    beside: the packaged model whose tower and projector this one shares; its folder must lie beside `out`.
    Raises `ConfigError` where the eyes are not those of `beside`, or a name is none of peft's.
    """
    if beside is not None and beside.resolve().parent != out.resolve().parent:
        raise ConfigError("a sibling lies beside the model whose eyes it shares", got=str(out), expected=beside.parent)
    if trained.over and beside is None:
        raise ConfigError("low-rank layers over those of another model need that model", fix="name it as beside=")
    out.mkdir(parents=True, exist_ok=True)
    kept, lora = kept_layers(base_folder, trained.layers), short_names(trained.lora)
    own = {} if trained.eyes is None else trained.eyes.named()
    eyes = {name: value.detach().to("cpu", KEPT).contiguous() for name, value in own.items()}
    eyes_file = "eyes.safetensors" if beside is None else f"../{beside.name}/eyes.safetensors"
    if beside is None and not eyes:
        raise ConfigError("a model needs eyes of its own, or a model beside it", fix="name it as beside=")
    if beside is not None and eyes:
        _same(eyes, load_file(out / eyes_file), beside.name)
    (out / ABOUT).unlink(missing_ok=True)  # with it a folder counts as whole
    parameters = _write_model_files(out / "model", base_folder, trained)
    if beside is None:
        save_file(eyes, out / eyes_file)
    save_file(lora, out / "lora.safetensors")
    adapters = [_part(out, "lora.safetensors") | {"scale": trained.scale, "layers": list(range(len(kept)))}]
    if trained.over:
        assert beside is not None
        (first,) = read_vlm(beside).adapters
        file = f"../{beside.name}/lora.safetensors"
        adapters.insert(0, _part(out, file) | {"scale": first.scale, "layers": [first.layers[layer] for layer in kept]})
    about = {
        "paceline_vlm": FORMAT,
        "description": _description(base, len(kept), trained.layers, beside),
        "licence": trained.record.get("licence", "Apache-2.0"),
        "base": base,
        "base_fingerprint": base_fingerprint(base_folder),
        "layers": kept,
        "eyes": _part(out, eyes_file),
        "adapters": adapters,
        "dtype": dtype,
        "parameters": parameters,
        "model": {name: sha256_of(out / "model" / name) for name in _MODEL_FILES},
    }
    text = json.dumps(about, indent=2) + "\n"
    _write_record(parse_vlm(out, text.encode()), {"provenance": provenance(), **trained.record})
    write_text(out / ABOUT, text)
    return out


def package_tiny_vlm(
    file: Path | str,
    out: Path | str,
    base_folder: Path | str,
    beside: Path | str | None = None,
    record: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Package a file of the training scripts: a mapping with lora, tower, projector and step.

    A sibling's has layers too, and needs no tower and projector where it is packaged `beside` the model it shares them
    with.

    Optional keys: scale (alpha over rank, 2 by default), over (see `Trained`). record: what the card tells.
    """
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    layers = state.get("layers")
    trained = Trained(
        state["lora"],
        Eyes(state["tower"], state["projector"]) if "tower" in state else None,
        float(state.get("scale", 2.0)),
        len(layers) if isinstance(layers, list | tuple) else layers,
        bool(state.get("over", False)),
        record={"training": {"steps": state["step"]}, **(record or {})},
    )
    out, base_folder = Path(out), Path(base_folder)
    if isinstance(layers, list | tuple) and list(layers) != kept_layers(base_folder, len(layers)):
        raise ConfigError(
            "these layers are not evenly spaced", got=list(layers), expected=kept_layers(base_folder, len(layers))
        )
    return package_vlm(trained, out, base_folder, beside=None if beside is None else Path(beside), dtype=dtype)


def merge_once(packaged: Path, base_folder: Path, folder: Path) -> None:
    """Merge a packaged model into a plain folder, unless that was done."""
    model, note = read_vlm(packaged), folder / _OF
    if note.exists() and note.read_bytes() == model.sha256.encode():
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    merge_vlm(model, base_folder, folder)
    write_text(note, model.sha256)


def write_record(out: Path, changes: Mapping[str, Any]) -> None:
    """Put these into the folder's training.json, and write its card anew."""
    path = out / "training.json"
    record: dict[str, Any] = {}
    if path.exists():
        with understood(f"the record {str(path)!r}", "remove it, and run the stage again"):
            record = validate(dict[str, Any], read_json(path, "the record"), f"the record {str(path)!r}")
    _write_record(read_vlm(out), {**record, **changes})


def _write_record(model: PackagedVlm, record: Mapping[str, Any]) -> None:
    write_text(model.folder / "training.json", json.dumps(record, indent=2) + "\n")
    write_text(model.folder / "README.md", vlm_card(model, record))


def short_names(lora: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of peft as layers.I.LINEAR.lora_A and lora_B, in `KEPT`. Raises `ConfigError` for another name."""
    found: dict[str, Tensor] = {}
    for name, value in lora.items():
        match = _LORA.search(name)
        if match is None:
            raise ConfigError(
                "not a low-rank layer of peft", got=name, expected="...layers.0.NAME.lora_A.default.weight"
            )
        found[f"layers.{match[1]}.{match[2]}.lora_{match[3]}"] = value.detach().to("cpu", KEPT).contiguous()
    return found


def _same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], name: str) -> None:
    differing = [key for key in {**ours, **theirs} if key not in ours or key not in theirs]
    differing += [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
    if differing:
        raise ConfigError(
            f"the tower and projector are not those of {name}", got=f"{len(differing)} differ, as {differing[0]}",
            fix=f"train with the eyes of {name} frozen, or package it by itself",
        )  # fmt: skip


def _part(out: Path, file: str) -> dict[str, Any]:
    return {"file": file, "sha256": sha256_of(out / file)}


def _write_model_files(folder: Path, base_folder: Path, trained: Trained) -> int:
    """Config, processor and template as transformers writes them, without a word of this machine; returns the size."""
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


def _description(base: str, count: int, layers: int | None, beside: Path | None) -> str:
    if beside is not None:
        return f"The draft model of {beside.name}: {count} layers behind its vision tower and projector"
    left = "" if layers is None else f", {count} layers of it"
    return (
        f"{base} with eyes{left}: a small vision-language model (LLaVA type) for pictures of shapes, signs and charts"
    )
