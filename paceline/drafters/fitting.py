"""Make a trained head ready to draft for a target: read it, check that it fits, lend it what it borrows."""

import copy
from os import PathLike
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ..core.interfaces import TargetView
from ..errors import ConfigError, IncompatibleModels
from ..heads import SpaceAdapter, load_head
from .draft_layer import native_form, runs_natively

_H = TypeVar("_H", bound=nn.Module)


def fitted(head: str | PathLike[str] | nn.Module, kind: type[_H], target: TargetView) -> _H:
    """A copy of the head in the target's dtype, on its device, attached; training the original does not change it.

    Where native kernels run it, its linear layers are packed and everything else is float32.
    Raises `ConfigError` for a head of another kind, `IncompatibleModels` for one of another target's sizes.
    """
    loaded = target.loaded
    made = copy.deepcopy(head) if isinstance(head, nn.Module) else load_head(head, loaded)
    if not isinstance(made, kind):
        raise ConfigError("the head is for another method", got=type(made).__name__, expected=kind.__name__)
    config = cast("Any", made.config)
    theirs = (config.hidden_size, config.vocab_size, tuple(config.states))
    ours = (loaded.hidden_size, loaded.vocab_size, (loaded.num_layers,))
    if theirs != ours:
        raise IncompatibleModels(
            f"the head does not fit {loaded.name}",
            got="hidden size {}, vocabulary {}, states {}".format(*theirs),
            expected="hidden size {}, vocabulary {}, states {}, the last".format(*ours),
        )
    made = made.to(loaded.device, loaded.dtype).eval().requires_grad_(False)
    embeddings, own = loaded.embeddings, getattr(config, "own_lm_head", False)
    cast("Any", made).attach(embeddings, embeddings if own else loaded.output_rows())
    if runs_natively(embeddings):
        native_form(made)
    return made


def row_dtype(target: TargetView) -> torch.dtype:
    """Of what enters a fitted head."""
    loaded = target.loaded
    return torch.float32 if runs_natively(loaded.embeddings) else loaded.dtype


def fitted_adapter(adapter: str | PathLike[str] | nn.Module, target: TargetView) -> SpaceAdapter:
    """SPACE's adapter as the target may wear it.

    Raises `ConfigError` for a module of another kind or without masks, `IncompatibleModels` for another target's sizes.
    """
    loaded = target.loaded
    made = adapter if isinstance(adapter, nn.Module) else load_head(adapter, loaded)
    if not isinstance(made, SpaceAdapter):
        raise ConfigError("the head is for another method", got=type(made).__name__, expected=SpaceAdapter.__name__)
    if made.num_masks < 1:
        raise ConfigError("the SPACE adapter has no mask tokens", got=made.num_masks, expected="at least one")
    theirs = (made.config.hidden_size, made.config.num_layers, made.config.vocab_size)
    ours = (loaded.hidden_size, loaded.num_layers, loaded.vocab_size)
    if theirs != ours:
        raise IncompatibleModels(
            f"the SPACE adapter does not fit {loaded.name}",
            got="hidden size {}, layers {}, vocabulary {}".format(*theirs),
            expected="hidden size {}, layers {}, vocabulary {}".format(*ours),
        )
    return made
