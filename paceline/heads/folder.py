"""A trained head as a folder, written whole or not at all, and validated completely when it is read.

config.json         method, target (name, fingerprint, sizes), head (the fields of the module's configuration)
model.safetensors   its weights in bfloat16; output rows that are the target's own are an index, `draft_ids`
README.md           the model card
training.json       data, command, versions, measured acceptance; sha256 of the weights
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..core.interfaces import ModelFacts
from ..errors import ConfigError, IncompatibleModels
from ..hf.checkpoint import read_headers
from ..schema import checked, meant, validate
from ..system.files import exists, new_folder, read_json
from ..system.provenance import sha256_of
from ..zoo.packaged import head_folder
from .eagle import EagleHead
from .exchange import read_published
from .int4_draft import Int4Draft
from .mtp import MtpHead
from .parallel import BlockwiseHead, MedusaHead
from .parts import Count, Size, Vocabulary
from .space import SpaceAdapter

FORMAT = 1
CONFIG, WEIGHTS, CARD, RECORD = "config.json", "model.safetensors", "README.md", "training.json"
_SIZES = ("hidden_size", "num_layers", "vocab_size")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

Head: TypeAlias = nn.Module
"""A module of one of these classes; each has its `config`, a frozen dataclass that names the `method`."""
HEADS: Mapping[str, type[Any]] = {
    "eagle": EagleHead,
    "eagle3": EagleHead,
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "mtp": MtpHead,
    "space": SpaceAdapter,
    "self_int4": Int4Draft,
}
"""The class of each method; its `Config` is the class of the configuration."""
METHODS = tuple(HEADS)


def method_of(head: Head) -> str:
    """The method a module is for. Raises `ConfigError` for a module of no known class."""
    method = getattr(getattr(head, "config", None), "method", None)
    if type(head) is not HEADS.get(cast("str", method)):
        expected = "one of " + ", ".join(sorted({kind.__name__ for kind in HEADS.values()}))
        raise ConfigError("this module is no head that can be saved", got=type(head).__name__, expected=expected)
    return cast("str", method)


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
    """The content of config.json: the method, the target it was trained for, and the module's configuration."""

    folder: Path
    method: str
    target_name: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    config: object


def save_head(
    folder: str | os.PathLike[str], module: Head, target: ModelFacts, record: Mapping[str, object], card: str
) -> Path:
    """Write a head that was trained for `target` into a new folder; returns it.

    record: training.json. card: README.md, see `model_card`. Raises `ConfigError` for a folder that is there already
    and for weights that are not finite.
    """
    place = Path(folder)
    about = {"name": target.name, "fingerprint": target.fingerprint}
    config = {
        "paceline_head": FORMAT,
        "method": method_of(module),
        "target": about | {size: getattr(target, size) for size in _SIZES},
        "head": asdict(cast("Any", module.config)),
    }
    tensors = {name: _stored(name, tensor) for name, tensor in module.state_dict().items()}
    with new_folder(place) as made:
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / CARD).write_text(card, encoding="utf-8")
        full = {**record, "weights_sha256": sha256_of(made / WEIGHTS)}
        (made / RECORD).write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
    return place


def head_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """Read config.json of a folder or a packaged head. Raises `ConfigError` for what is no head of this format."""
    place = _folder_of(folder)
    given = _read_object(place / CONFIG)
    if given.get("paceline_head") != FORMAT:
        raise ConfigError(
            f"{str(place)!r} holds no head that this Paceline reads",
            got=f'"paceline_head": {given.get("paceline_head")!r}',
            expected=f'"paceline_head": {FORMAT}',
        )
    if (method := given.get("method")) not in METHODS:
        raise ConfigError(
            "unknown method of a head",
            got=repr(method),
            expected="one of " + ", ".join(METHODS),
            fix=meant(str(method), METHODS),
        )
    file = validate(_File, given, str(place / CONFIG))
    config: Any = validate(HEADS[file.method].Config, file.head, f'"head" of method {file.method!r}')
    if config.method != file.method:
        expected = 3 if file.method == "eagle3" else 1
        raise ConfigError(f'"version" does not fit the method {file.method!r}', got=config.version, expected=expected)
    sizes = {size: getattr(file.target, size) for size in _SIZES}
    return HeadInfo(place, file.method, file.target.name, file.target.fingerprint, config=config, **sizes)


def trained_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """As `head_info`, but also of a draft model, whose training.json names the target (its sizes are 0)."""
    place = _folder_of(folder)
    record = _read_object(place / RECORD) if (place / RECORD).is_file() else {}
    facts = record.get("target")
    if record.get("method") != "draft_model" or facts is None:
        return head_info(folder)
    target = validate(_DraftTarget, facts, f'"target" of {place / RECORD}')
    return HeadInfo(place, "draft_model", target.name, target.fingerprint, 0, 0, target.vocab_size, None)


def read_record(folder: str | os.PathLike[str]) -> dict[str, object]:
    """Read training.json of a folder or a packaged head. Raises `ConfigError` where it is missing or broken."""
    return _read_object(_folder_of(folder) / RECORD)


def load_head(
    folder: str | os.PathLike[str], target: ModelFacts | None = None, allow_other_target: bool = False
) -> Head:
    """Read a head; for a target it comes in the target's dtype and on its device, else in float32 on the CPU.

    folder: or the name of a packaged head; a head that others published is read by `exchange`. The target's own
    tensors that a head uses (embeddings, output rows) are attached later, by `attach`. allow_other_target: accept a
    head that was trained for another model of the same sizes: answers stay exact, fewer drafts are accepted.
    Raises `ConfigError` that lists every missing, unknown or misshapen tensor, and `IncompatibleModels` for another
    target.
    """
    place = _folder_of(folder)
    if "paceline_head" not in _read_object(place / CONFIG):
        return read_published(place, target)
    info = head_info(folder)
    if target is not None:
        _check_target(info, target, allow_other_target)
    make = HEADS[info.method]
    with torch.device("meta"):  # shapes only: a broken configuration must not claim memory
        expected = make(info.config).state_dict()
    tensors = _read_weights(info.folder, expected)
    _check_draft_ids(info, tensors.get("draft_ids"))
    with torch.random.fork_rng(devices=[]):  # initial weights use up random numbers
        head = make(info.config)
    head.load_state_dict(tensors)
    if target is not None:
        head.to(device=target.device, dtype=target.dtype)
    return head.eval().requires_grad_(False)


def _folder_of(folder: str | os.PathLike[str]) -> Path:
    return head_folder(folder if isinstance(folder, str) else Path(folder))


def _check_target(info: HeadInfo, target: ModelFacts, allow_other_target: bool) -> None:
    theirs = {size: getattr(info, size) for size in _SIZES}
    ours: dict[str, int] = {size: getattr(target, size) for size in _SIZES}
    if theirs != ours:
        raise IncompatibleModels(
            f"the head {info.folder.name!r} does not fit {target.name}",
            got=_listed(ours),
            expected=f"{_listed(theirs)}, as in {info.target_name}, for which it was trained",
            fix=f"load {info.target_name}, or train a head for {target.name} with `paceline train`",
        )
    if info.fingerprint != target.fingerprint and not allow_other_target:
        raise IncompatibleModels(
            f"the head {info.folder.name!r} was trained for another model",
            got=f"{target.name}, fingerprint {target.fingerprint[:12]}",
            expected=f"{info.target_name}, fingerprint {info.fingerprint[:12]}",
            fix=f"load {info.target_name}, train a head for {target.name} with `paceline train`, or allow another "
            "target (allow_other_target): the answers stay exact, but fewer drafts are accepted",
        )


def _listed(sizes: Mapping[str, int]) -> str:
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
    """They index the target's output layer and become token ids, so that a wrong one must be refused here."""
    if ids is None:
        return
    ascends = bool((ids.diff() > 0).all())
    if not ascends or (len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < info.vocab_size):
        raise ConfigError(
            f"draft_ids in {info.folder / WEIGHTS} are no draft vocabulary",
            expected=f"ascending token ids from 0 to {info.vocab_size - 1}",
        )


def _read_object(path: Path) -> dict[str, object]:
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
