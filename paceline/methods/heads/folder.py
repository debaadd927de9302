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
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...errors import ConfigError, IncompatibleModels
from ...hf.fingerprint import LIKE, likeness
from ...hf.gguf.file import SUFFIX
from ...system.files import new_folder, write_text
from ...system.provenance import sha256_of
from ...target.loaded import LoadedModel
from ...zoo import remark_elsewhere
from .card import model_card
from .info import (
    CARD,
    CONFIG,
    FORMAT,
    RECORD,
    SIZES,
    WEIGHTS,
    Head,
    HeadFile,
    HeadInfo,
    HeadTarget,
    head_class,
    head_info,
    method_of,
    place_of,
    read_config,
    trained_info,
)
from .parts import check_sizes, filled
from .published import facts_of, read_published, read_tensors

_LOG = logging.getLogger("paceline")


def save_head(folder: str | os.PathLike[str], module: Head, target: LoadedModel, record: Mapping[str, object]) -> Path:
    """Write a head that was trained for `target` into a new folder; returns it.

    record: training.json, from which the model card is made, see `model_card`. Raises `ConfigError` for a folder that
    is there already and for weights that are not finite.
    """
    place = Path(folder)
    method, config = method_of(module), asdict(cast("Any", module.config))
    file = HeadFile(FORMAT, method, HeadTarget.of(target), config)
    tensors = {name: _stored(name, tensor) for name, tensor in module.state_dict().items()}
    with new_folder(place) as written:
        save_file(tensors, written / WEIGHTS, metadata={"format": "pt"})
        write_text(written / CONFIG, json.dumps(asdict(file), indent=2) + "\n")
        write_record(written, place.name, {**record, "weights_sha256": sha256_of(written / WEIGHTS)})
    return place


def write_record(folder: Path, name: str, record: Mapping[str, object]) -> None:
    """Write training.json of a head or a draft model, and the card that is made from it. name: the folder's own."""
    write_text(folder / RECORD, json.dumps(record, indent=2) + "\n")
    write_text(folder / CARD, model_card(name, trained_info(folder), (folder / WEIGHTS).stat().st_size, record))


def load_head(
    folder: str | os.PathLike[str], target: LoadedModel | None = None, allow_other_target: bool = False
) -> Head:
    """Read a head; for a target it comes in the target's dtype and on its device, else in float32 on the CPU.

    folder: or the name of a packaged head; a head that others published, which needs its target, or its GGUF file. The
    target's own tensors that a head uses (embeddings, output rows) are attached later, by `attach`. allow_other_target:
    accept a head that was trained for another model of the same sizes: answers stay exact, fewer drafts are accepted.
    Raises `ConfigError` that lists every missing, unknown or misshapen tensor, and `IncompatibleModels` for another
    target.
    """
    place = place_of(folder)
    if place.suffix == SUFFIX or "paceline_head" not in read_config(place):
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
            got=", ".join(sorted(entry.name for entry in info.folder.iterdir())),
            expected="safetensors only: other formats can run code when they are read",
        )
    tensors = read_tensors(path)
    _check_draft_ids(info, tensors.get("draft_ids"))
    floats = torch.float32 if target is None else target.dtype
    tensors = {name: tensor.to(floats) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    head = filled(head_class(info.method), info.config, tensors, info.folder)
    return head if target is None else head.to(target.device)


def _check_target(info: HeadInfo, target: LoadedModel, allow_other_target: bool) -> None:
    trained_for, offered = ({size: getattr(of, size) for size in SIZES} for of in (info.target, target))
    fix = f"load {info.target.name}, or train a head for {target.name} with `paceline train`"
    check_sizes(f"the head {info.folder.name!r} does not fit {target.name}", trained_for, offered, fix)
    if info.target.fingerprint == target.fingerprint or allow_other_target:
        return
    if (like := likeness(info.target.sketch, target.origin)) > LIKE:
        note = "%s is a rounded copy of %s (%.0f%% alike), for which the head %r was trained: the answers stay exact."
        _LOG.warning(note, target.name, info.target.name, 100 * like, info.folder.name)
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
