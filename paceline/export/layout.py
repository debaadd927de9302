"""What an export consists of before it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import NotExportable
from ..heads.foreign_files import Target

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What is known of the target of a head.

    name: what the engine is told to serve. architectures: as its own config.json has them; empty where the target is
    not loaded. context: the most tokens a sequence may have. lm_head: its output rows [V, E], if loaded.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    architectures: tuple[str, ...] = ()
    context: int | None = None
    lm_head: Tensor | None = None
    embeddings: Tensor | None = None

    @property
    def as_target(self) -> Target:
        """The same for the readers."""
        return Target(self.num_layers, self.hidden_size, self.vocab_size, self.embeddings, self.lm_head)


@dataclass(frozen=True)
class Layout:
    """One folder: config.json, the tensors of model.safetensors, other files, and how it is served.

    serve: the command; {target} and {folder} stand for their places. notes: what the engine does otherwise than
    Paceline, one sentence each. ids: an index written as a file of its own, by file name.
    """

    config: Json
    tensors: Mapping[str, Tensor]
    serve: str
    notes: tuple[str, ...] = ()
    ids: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])


def refuse(engine: str, what: str, fix: str | None = None) -> NotExportable:
    """The error for a feature that an engine's layout cannot hold."""
    return NotExportable(f"{engine} cannot hold this head", got=what, fix=fix)


def stored(tensor: Tensor) -> Tensor:
    """As it is written: in bfloat16 where that loses nothing, as for every head trained here."""
    tensor = tensor.detach().cpu()
    half = tensor.to(torch.bfloat16)
    return (half if torch.equal(half.to(tensor.dtype), tensor) else tensor).clone().contiguous()


def serve_line(template: str, target: str, folder: str) -> str:
    """The command with its places filled in; they hold JSON, so `format` cannot do it."""
    return template.replace("{target}", target).replace("{folder}", folder)
