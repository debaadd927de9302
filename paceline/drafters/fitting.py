"""Make a trained head ready to draft for a target: read it, check that it fits, lend it what it borrows."""

import copy
from os import PathLike
from typing import Any, TypeVar, cast

from torch import nn

from ..errors import ConfigError, IncompatibleModels
from ..heads import load_head
from ..runner import ModelRunner
from .eagle import output_rows

_H = TypeVar("_H", bound=nn.Module)


def fitted(head: str | PathLike[str] | nn.Module, kind: type[_H], target: ModelRunner) -> _H:
    """A copy of the head in the target's dtype, on its device, attached; training the original does not change it.

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
    embeddings = cast("Any", loaded.model.get_input_embeddings()).weight
    own = getattr(config, "own_lm_head", False)
    cast("Any", made).attach(embeddings, embeddings if own else output_rows(loaded))
    return made
