"""A trained head as a folder, written whole or not at all, and validated completely when it is read.

config.json         method, target (name, fingerprint, sizes), head (the fields of the module's configuration)
model.safetensors   its weights in bfloat16; output rows that are the target's own are an index, `draft_ids`
README.md           the model card
training.json       data, command, versions, measured acceptance; sha256 of the weights
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.interfaces import ModelFacts
from ...errors import ConfigError, IncompatibleModels
from ...hf.fingerprint import LIKE, likeness
from ...hf.gguf.file import SUFFIX
from ...schema import checked, validate
from ...system.files import exists, new_folder, read_object, write_text
from ...system.provenance import sha256_of
from ...zoo import remark_elsewhere
from ...zoo.packaged import head_folder
from ..dflash.head import DFlashHead
from ..eagle.head import EagleHead
from ..parallel.head import BlockwiseHead, MedusaHead
from ..self_int4.head import Int4Draft
from ..space.adapter import SpaceAdapter
from .card import model_card
from .exchange import read_published
from .parts import Count, Vocabulary, Width, check_sizes, filled
from .published import facts_of, read_tensors

FORMAT = 1
_LOG = logging.getLogger("paceline")
CONFIG, WEIGHTS, CARD, RECORD = "config.json", "model.safetensors", "README.md", "training.json"
DRAFT_MODEL = "draft_model"
"""The method of a draft model in its training.json."""
_SIZES = ("hidden_size", "num_layers", "vocab_size")

Head: TypeAlias = nn.Module
"""A module of one of these classes; each has its `config`, a frozen dataclass that names the `method`."""
Method = Literal["eagle", "eagle3", "peagle", "dflash", "medusa", "blockwise", "mtp", "space", "self_int4"]
METHODS = get_args(Method)
HEADS: Mapping[str, type[Any]] = {
    **dict.fromkeys(("eagle", "eagle3", "peagle", "mtp"), EagleHead),
    "dflash": DFlashHead,
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "space": SpaceAdapter,
    "self_int4": Int4Draft,
}
"""The class of each method; its `Config` is the class of the configuration."""


def method_of(head: Head) -> str:
    """The method a module is for. Raises `ConfigError` for a module of no known class."""
    method: Any = getattr(getattr(head, "config", None), "method", None)
    if type(head) is not HEADS.get(method):
        expected = "one of " + ", ".join(sorted({kind.__name__ for kind in HEADS.values()}))
        raise ConfigError("this module is no head that can be saved", got=type(head).__name__, expected=expected)
    return method


@checked
class HeadTarget:
    """The target that a head, or a draft model, was trained for. sketch: see `hf.fingerprint`; old heads have none."""

    name: str
    fingerprint: str
    hidden_size: Width
    num_layers: Count
    vocab_size: Vocabulary
    sketch: str = ""

    @classmethod
    def of(cls, target: ModelFacts) -> "HeadTarget":
        return cls(target.name, target.fingerprint, *(getattr(target, size) for size in _SIZES), sketch=target.sketch)


@checked
class _File:
    """config.json of a head; `head` holds the fields of its module's configuration."""

    paceline_head: int
    method: Method
    target: HeadTarget
    head: dict[str, Any]


@dataclass(frozen=True)
class HeadInfo:
    """What a head or a draft model is: its method, its target, and its module's configuration (None of a model)."""

    folder: Path
    method: str
    target: HeadTarget
    config: Any


def save_head(folder: str | os.PathLike[str], module: Head, target: ModelFacts, record: Mapping[str, object]) -> Path:
    """Write a head that was trained for `target` into a new folder; returns it.

    record: training.json, from which the model card is made, see `model_card`. Raises `ConfigError` for a folder that
    is there already and for weights that are not finite.
    """
    place = Path(folder)
    method, config = method_of(module), asdict(cast("Any", module.config))
    file = _File(FORMAT, cast("Any", method), HeadTarget.of(target), config)
    tensors = {name: _stored(name, tensor) for name, tensor in module.state_dict().items()}
    with new_folder(place) as made:
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        write_text(made / CONFIG, json.dumps(asdict(file), indent=2) + "\n")
        write_record(made, place.name, {**record, "weights_sha256": sha256_of(made / WEIGHTS)})
    return place


def write_record(folder: Path, name: str, record: Mapping[str, object]) -> None:
    """Write training.json of a head or a draft model, and the card that is made from it. name: the folder's own."""
    write_text(folder / RECORD, json.dumps(record, indent=2) + "\n")
    write_text(folder / CARD, model_card(name, trained_info(folder), (folder / WEIGHTS).stat().st_size, record))


def head_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """Read config.json of a folder or a packaged head. Raises `ConfigError` for what is no head of this format."""
    place = _folder_of(folder)
    given = _read_object(place / CONFIG)
    if given.get("paceline_head") != FORMAT:
        got, expected = f'"paceline_head": {given.get("paceline_head")!r}', f'"paceline_head": {FORMAT}'
        raise ConfigError(f"{str(place)!r} holds no head that this Paceline reads", got=got, expected=expected)
    file = validate(_File, given, str(place / CONFIG))
    config: Any = validate(HEADS[file.method].Config, file.head, f'"head" of method {file.method!r}')
    if config.method != file.method:
        raise ConfigError("the sizes of this head are those of another method", got=config.method, expected=file.method)
    return HeadInfo(place, file.method, file.target, config)


def trained_info(folder: str | os.PathLike[str]) -> HeadInfo:
    """As `head_info`, but also of a draft model, whose training.json names the target."""
    place = _folder_of(folder)
    record = _read_object(place / RECORD) if (place / RECORD).is_file() else {}
    if record.get("method") != DRAFT_MODEL:
        return head_info(folder)
    target = validate(HeadTarget, record.get("target"), f'"target" of {place / RECORD}')
    return HeadInfo(place, DRAFT_MODEL, target, None)


def read_record(folder: str | os.PathLike[str]) -> dict[str, object]:
    """Read training.json of a folder or a packaged head. Raises `ConfigError` where it is missing or broken."""
    return _read_object(_folder_of(folder) / RECORD)


def load_head(
    folder: str | os.PathLike[str], target: ModelFacts | None = None, allow_other_target: bool = False
) -> Head:
    """Read a head; for a target it comes in the target's dtype and on its device, else in float32 on the CPU.

    folder: or the name of a packaged head; a head that others published, which needs its target, or its GGUF file. The
    target's own tensors that a head uses (embeddings, output rows) are attached later, by `attach`. allow_other_target:
    accept a head that was trained for another model of the same sizes: answers stay exact, fewer drafts are accepted.
    Raises `ConfigError` that lists every missing, unknown or misshapen tensor, and `IncompatibleModels` for another
    target.
    """
    place = _folder_of(folder)
    if place.suffix == SUFFIX or "paceline_head" not in _read_object(place / CONFIG):
        if target is None:
            raise ConfigError(f"the head of others at {str(place)!r} cannot be read without its target")
        return read_published(place, facts_of(target)).to(device=target.device, dtype=target.dtype)
    info = head_info(folder)
    if target is not None:
        _check_target(info, target, allow_other_target)
    path = info.folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{str(info.folder)!r} has no {WEIGHTS}",
            got=", ".join(sorted(one.name for one in info.folder.iterdir())),
            expected="safetensors only: other formats can run code when they are read",
        )
    tensors = read_tensors(path)
    _check_draft_ids(info, tensors.get("draft_ids"))
    floats = torch.float32 if target is None else target.dtype
    tensors = {name: one.to(floats) if one.is_floating_point() else one for name, one in tensors.items()}
    head = filled(HEADS[info.method], info.config, tensors, info.folder)
    return head if target is None else head.to(target.device)


def _folder_of(folder: str | os.PathLike[str]) -> Path:
    return head_folder(folder if isinstance(folder, str) else Path(folder))


def _check_target(info: HeadInfo, target: ModelFacts, allow_other_target: bool) -> None:
    theirs, ours = ({size: getattr(of, size) for size in _SIZES} for of in (info.target, target))
    fix = f"load {info.target.name}, or train a head for {target.name} with `paceline train`"
    check_sizes(f"the head {info.folder.name!r} does not fit {target.name}", theirs, ours, fix)
    if info.target.fingerprint == target.fingerprint or allow_other_target:
        return
    if (like := likeness(info.target.sketch, target.origin)) > LIKE:
        what = "%s is a rounded copy of %s (%.0f%% alike), for which the head %r was trained: the answers stay exact."
        _LOG.warning(what, target.name, info.target.name, 100 * like, info.folder.name)
        return
    remark = f" ({known})" if (known := remark_elsewhere(info.target.name)) else ""
    raise IncompatibleModels(
        f"the head {info.folder.name!r} was trained for another model",
        got=f"{target.name}, fingerprint {target.fingerprint[:12]}",
        expected=f"{info.target.name}, fingerprint {info.target.fingerprint[:12]}{remark}",
        fix=f"load {info.target.name}, train a head for {target.name} with `paceline train`, or allow another "
        "target (allow_other_target): the answers stay exact, but fewer drafts are accepted",
    )


def _stored(name: str, tensor: Tensor) -> Tensor:
    """As it is written: floats in bfloat16. Raises `ConfigError` for NaN and infinity."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.clone().contiguous()
    if not bool(tensor.isfinite().all()):
        raise ConfigError(f"the weight {name!r} of this head is not finite", fix="train again with a lower rate")
    return tensor.to(torch.bfloat16, copy=True).contiguous()


def _check_draft_ids(info: HeadInfo, ids: Tensor | None) -> None:
    """They index the target's output layer and become token ids, so that a wrong one must be refused here."""
    if ids is None or ids.is_floating_point():
        return
    if not bool((ids.diff() > 0).all() & (ids >= 0).all() & (ids < info.target.vocab_size).all()):
        raise ConfigError(
            f"draft_ids in {info.folder / WEIGHTS} are no draft vocabulary",
            expected=f"ascending token ids from 0 to {info.target.vocab_size - 1}",
        )


def _read_object(path: Path) -> dict[str, object]:
    if not exists(path):
        raise ConfigError(
            f"no head at {str(path.parent)!r}",
            got=f"no {path.name}",
            expected=f"a folder with {CONFIG}, {WEIGHTS}, {CARD} and {RECORD}, or a name that `paceline models` lists",
        )
    return read_object(path)
