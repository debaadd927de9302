"""Loads trained heads, checks that they fit a target, and attaches them to it."""

import copy
from os import PathLike
from typing import TypeVar

import torch
from torch import nn

from ...core.interfaces import Target
from ...errors import ConfigError
from ...quant.packed import has_kernels
from ...target.loaded import LoadedModel
from ..eagle.module import mtp_head
from .draft_layer import pack_head, runs_natively
from .folder import load_head
from .parts import DraftHead, check_sizes

_H = TypeVar("_H", bound=nn.Module)
_F = TypeVar("_F", bound=DraftHead)


def read_head(head: str | PathLike[str] | nn.Module | None, kind: type[_H], target: LoadedModel, **sizes: object) -> _H:
    """Read a head from a folder, or take a module; None: the MTP module in the target's checkpoint.

    sizes: attributes that its config must have.

    Raises `ConfigError` for a head of another kind, `IncompatibleModels` for one of another target's sizes.
    """
    module = mtp_head(target) if head is None else head
    module = module if isinstance(module, nn.Module) else load_head(module, target)
    shape = getattr(kind, "Config", None)  # DSpark's is DFlash's and more
    if not isinstance(module, kind) or type(module.config) is not shape:
        raise ConfigError("the head is for another method", got=type(module).__name__, expected=kind.__name__)
    message = f"this {kind.__name__} does not fit {target.name}: it was made for another target"
    fix = "train a head for this target, or load the target it was trained for"
    check_sizes(message, {name: getattr(module.config, name) for name in sizes}, sizes, fix)
    return module


def attach_head(head: str | PathLike[str] | nn.Module | None, kind: type[_F], target: Target, **sizes: object) -> _F:
    """A head, or a copy of a module, in the target's dtype and on its device, attached to it. sizes: as in `read_head`.

    See `pack_head` for what kernels run of it. Raises as `read_head`.
    """
    loaded = target.loaded
    attached = read_head(head, kind, loaded, vocab_size=loaded.vocab_size, **sizes)
    attached = copy.deepcopy(attached) if attached is head else attached
    attached = attached.to(loaded.device, loaded.dtype).eval().requires_grad_(False)
    rows = loaded.embeddings if attached.owns_rows else loaded.output_rows()
    attached = attached.attach(loaded.embeddings, rows.to(loaded.device, loaded.dtype)).folded()
    if runs_natively(loaded, attached):
        pack_head(attached)
    return attached


def row_dtype(target: Target) -> torch.dtype:
    """The input dtype of an attached head that is run as a module."""
    loaded = target.loaded
    return torch.float32 if runs_natively(loaded) and has_kernels(loaded.device) else loaded.dtype
