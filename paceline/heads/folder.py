"""A trained head as a folder, written whole or not at all, and read with nothing taken on trust.

config.json         method, target (name, fingerprint, sizes), head (the fields of the module's configuration)
model.safetensors   its weights in bfloat16; output rows that are the target's own are an index, `draft_ids`
README.md           the model card
training.json       data, command, versions, measured acceptance; sha256 of the weights
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.interfaces import ModelFacts
from ..errors import ConfigError, IncompatibleModels
from ..hf.checkpoint import read_headers
from ..modules.sizes import Count, Size, Vocabulary
from ..runner import LoadedModel
from ..schema import checked, validate
from ..system.files import exists, read_json
from ..system.provenance import sha256_of
from ..zoo.packaged import head_folder
from .foreign import read_foreign
from .kinds import Head, check_method, config_from_json, config_to_json, method_of, new_head

FORMAT = 1
CONFIG, WEIGHTS, CARD, RECORD = "config.json", "model.safetensors", "README.md", "training.json"
_SIZES = ("hidden_size", "num_layers", "vocab_size")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@checked
class _Target:
    """The target in config.json of a head."""

    name: str
    fingerprint: str
    hidden_size: Size
    num_layers: Count
    vocab_size: Vocabulary


@checked
class _File:
    """config.json of a head; `head` holds the fields of its module's configuration."""

    paceline_head: int
    method: str
    target: _Target
    head: dict[str, Any]


@checked
class _DraftTarget:
    """The target in training.json of a draft model."""

    name: str
    fingerprint: str
    vocab_size: Vocabulary


@dataclass(frozen=True)
class HeadInfo:
    """What config.json says: the method, the target it was trained for, and the module's configuration."""

    folder: Path
    method: str
    target_name: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    config: object


def save_head(
    folder: str | os.PathLike[str], module: Head, target: LoadedModel, record: Mapping[str, object], card: str
) -> Path:
    """Write a head that was trained for `target` into a new folder; returns it.

    record: training.json. card: README.md, see `model_card`. Raises `ConfigError` for a folder that is there already
    and for weights that are not finite.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{str(place)!r} exists already", expected="a new folder", fix="name another, or remove it")
    config = {
        "paceline_head": FORMAT,
        "method": method_of(module),
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            **{size: getattr(target, size) for size in _SIZES},
        },
        "head": config_to_json(module),
    }
    tensors = {name: _stored(name, tensor) for name, tensor in module.state_dict().items()}
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        made.chmod(0o755)  # mkdtemp's are for their owner only
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / CARD).write_text(card, encoding="utf-8")
        full = {**record, "weights_sha256": sha256_of(made / WEIGHTS)}
        (made / RECORD).write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
        made.rename(place)  # fails where something non-empty has come into being meanwhile
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return place


def head_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """Read config.json of a folder or a packaged head. Raises `ConfigError` for what is no head of this format."""
    place = _place_of(folder)
    given = _json_object(place / CONFIG)
    if given.get("paceline_head") != FORMAT:
        raise ConfigError(
            f"{str(place)!r} holds no head that this Paceline reads",
            got=f'"paceline_head": {given.get("paceline_head")!r}',
            expected=f'"paceline_head": {FORMAT}',
        )
    check_method(given.get("method"))
    file = validate(_File, given, str(place / CONFIG))
    config = config_from_json(file.method, file.head)
    target = file.target
    sizes = {size: getattr(target, size) for size in _SIZES}
    return HeadInfo(place, file.method, target.name, target.fingerprint, config=config, **sizes)


def trained_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """As `head_info`; also of a draft model, of which training.json says what it was trained for (hidden size 0)."""
    place = _place_of(folder)
    record = _json_object(place / RECORD) if (place / RECORD).is_file() else {}
    facts = record.get("target")
    if record.get("method") != "draft_model" or facts is None:
        return head_info(folder)
    told = validate(_DraftTarget, facts, f'"target" of {place / RECORD}')
    return HeadInfo(place, "draft_model", told.name, told.fingerprint, 0, 0, told.vocab_size, None)


def read_record(folder: str | os.PathLike[str]) -> dict[str, object]:
    """Read training.json of a folder or a packaged head. Raises `ConfigError` where it is missing or broken."""
    return _json_object(_place_of(folder) / RECORD)


def load_head(
    folder: str | os.PathLike[str], target: ModelFacts | None = None, allow_other_target: bool = False
) -> Head:
    """Read a head; for a target it comes in the target's dtype and on its device, else in float32 on the CPU.

    folder: or the name of a packaged head; one that others published is read by `foreign`. What the head borrows of the
    target (embeddings, output rows) is lent to it by `attach`, later. allow_other_target: take one that was trained for
    another model of the same sizes: answers stay exact, fewer drafts stand. Raises `ConfigError` that lists every
    missing, unknown or misshapen tensor, and `IncompatibleModels` for another target.
    """
    place = _place_of(folder)
    if "paceline_head" not in _json_object(place / CONFIG):
        return read_foreign(place, target)
    info = head_info(folder)
    if target is not None:
        _check_target(info, target, allow_other_target)
    with torch.device("meta"):  # shapes only: a broken configuration must not claim memory
        expected = new_head(info.method, info.config).state_dict()
    tensors = _read_weights(info.folder, expected)
    _check_draft_ids(info, tensors.get("draft_ids"))
    with torch.random.fork_rng(devices=[]):  # the weights it is made with use up random numbers
        head = new_head(info.method, info.config)
    head.load_state_dict(tensors)
    if target is not None:
        head.to(device=target.device, dtype=target.dtype)
    return head.eval().requires_grad_(False)


def _place_of(folder: str | os.PathLike[str]) -> Path:
    return head_folder(folder if isinstance(folder, str) else Path(folder))


def _check_target(info: HeadInfo, target: ModelFacts, allow_other_target: bool) -> None:
    theirs = {size: getattr(info, size) for size in _SIZES}
    ours: dict[str, int] = {size: getattr(target, size) for size in _SIZES}
    if theirs != ours:
        raise IncompatibleModels(
            f"the head {info.folder.name!r} does not fit {target.name}",
            got=_told(ours),
            expected=f"{_told(theirs)}, as in {info.target_name}, for which it was trained",
            fix=f"load {info.target_name}, or train a head for {target.name} with `paceline train`",
        )
    if info.fingerprint != target.fingerprint and not allow_other_target:
        raise IncompatibleModels(
            f"the head {info.folder.name!r} was trained for another model",
            got=f"{target.name}, fingerprint {target.fingerprint[:12]}",
            expected=f"{info.target_name}, fingerprint {info.fingerprint[:12]}",
            fix=f"load {info.target_name}, train a head for {target.name} with `paceline train`, or allow another "
            "target (allow_other_target): the answers stay exact, but fewer drafts stand",
        )


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _stored(name: str, tensor: Tensor) -> Tensor:
    """As it is written: floats in bfloat16. Raises `ConfigError` for NaN and infinity."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.clone().contiguous()
    if not bool(tensor.isfinite().all()):
        raise ConfigError(f"the weight {name!r} of this head is not finite", fix="train again with a lower rate")
    return tensor.to(torch.bfloat16, copy=True).contiguous()


def _read_weights(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor, checked against names and shapes before any is read."""
    path = folder / WEIGHTS
    if not path.is_file():
        others = sorted(one.name for one in folder.iterdir() if one.suffix in _OTHER_FORMATS)
        raise ConfigError(
            f"{str(folder)!r} has no {WEIGHTS}",
            got=", ".join(others) or "no weights",
            expected="safetensors only: other formats can run code when they are read" if others else WEIGHTS,
        )
    try:
        shapes = {name: one.shape for name, one in read_headers([path]).items()}
        with safe_open(path, framework="pt") as file:
            problems = [f"missing {name}" for name in sorted(expected) if name not in shapes]
            problems += [f"unexpected {name}" for name in sorted(shapes) if name not in expected]
            problems += [
                f"{name} is {list(shapes[name])} instead of {list(tensor.shape)}"
                for name, tensor in sorted(expected.items())
                if name in shapes and shapes[name] != tuple(tensor.shape)
            ]
            if problems:
                raise ConfigError(f"the tensors in {path} do not fit config.json", got="; ".join(problems))
            tensors = {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise ConfigError(
            f"{path} cannot be read", got=str(error), expected="a whole safetensors file", fix="fetch the head again"
        ) from error
    for name, tensor in tensors.items():
        floats = expected[name].is_floating_point()
        if tensor.is_floating_point() != floats or (floats and not math.isfinite(float(tensor.float().sum()))):
            raise ConfigError(f"the tensor {name} in {path} holds other than finite numbers of its kind")
    return tensors


def _check_draft_ids(info: HeadInfo, ids: Tensor | None) -> None:
    """They become rows of the target's output layer, and tokens: a wrong one must not get that far."""
    if ids is None:
        return
    ascends = bool((ids.diff() > 0).all())
    if not ascends or (len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < info.vocab_size):
        raise ConfigError(
            f"draft_ids in {info.folder / WEIGHTS} are no draft vocabulary",
            expected=f"ascending token ids from 0 to {info.vocab_size - 1}",
        )


def _json_object(path: Path) -> dict[str, object]:
    if not exists(path):
        raise ConfigError(
            f"no head at {str(path.parent)!r}",
            got=f"no {path.name}",
            expected=f"a folder with {CONFIG}, {WEIGHTS}, {CARD} and {RECORD}, or a name that `paceline models` lists",
        )
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", got=type(value).__name__)
    return cast("dict[str, object]", value)
