"""A head as others publish it: its config.json and its tensors by name, and the strict way to take them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ConfigError
from ..hf.checkpoint import one_line, weight_files
from ..system.files import exists, read_json

WEIGHT_FILES = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Where published heads keep their tensors, the safe format first."""


@dataclass(frozen=True)
class Target:
    """What a reader must know of the target: a published config.json often leaves it out.

    embeddings [V, E] and lm_head [V, E]: to tell a copy of the target's tables from tables of the head's own.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    embeddings: Tensor | None = None
    lm_head: Tensor | None = None


@dataclass
class Published:
    """Tensors are taken one by one; `finish` refuses if any was missing, misshapen or left over."""

    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    problems: list[str] = field(default_factory=list[str])

    def take(self, name: str, shape: tuple[int, ...], floats: bool = True) -> Tensor:
        """The tensor of that name, of floats or integers; one without numbers if it is missing: `finish` will tell."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            self.problems.append(f"{name} is missing")
        elif tuple(tensor.shape) != shape:
            self.problems.append(f"{name} is {list(tensor.shape)} and not {list(shape)}")
        elif tensor.is_floating_point() != floats or tensor.is_complex():
            self.problems.append(f"{name} holds {tensor.dtype}")
        else:
            return tensor
        return torch.empty(shape, device="meta")

    def finish(self) -> None:
        """Raises `ConfigError` with everything that did not fit."""
        self.problems += [f"{name} is unknown" for name in sorted(self.tensors)]
        if self.problems:
            raise ConfigError(
                f"the tensors of the head at {str(self.folder)!r} do not fit its layout",
                got="; ".join(self.problems),
                expected="every tensor of the layout and no other",
            )


def dtype_of(tensors: Iterable[Tensor]) -> torch.dtype:
    """The narrowest float type that holds them all: files mix halves with output rows in float32."""
    floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return reduce(torch.promote_types, floats)


def is_copy(table: Tensor, target: Tensor) -> bool:
    """True if a table of the head is the target's. Heads are stored in half precisions: a copy differs by rounding."""
    return torch.allclose(table.float(), target.to(table.device).float(), rtol=2**-7, atol=1e-6)


def read_published(folder: Path) -> Published:
    """Config and tensors of a published head. Raises `ConfigError` for files that are not there or cannot be read."""
    if not exists(folder / "config.json"):
        raise ConfigError(
            f"no head at {str(folder)!r}", got="no config.json",
            expected="a folder with config.json and the head's weights",
        )  # fmt: skip
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"config.json of {str(folder)!r} is not an object", got=type(config).__name__)
    return Published(folder, config, _tensors(folder))  # pyright: ignore[reportUnknownArgumentType]


def _tensors(folder: Path) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        if files := weight_files(folder, name):
            return {key: value for file in files for key, value in _load(file).items()}
    raise ConfigError(
        f"no weights at {str(folder)!r}", got=", ".join(sorted(path.name for path in folder.iterdir())),
        expected="one of " + ", ".join(WEIGHT_FILES),
    )  # fmt: skip


def _load(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # Pickles of others run code when they are opened; this reads tensors and nothing else.
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, SafetensorError, EOFError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read", got=one_line(error)) from error
    except Exception as error:  # pickle.UnpicklingError, and what its subclasses make of foreign objects
        raise ConfigError(
            f"{str(file)!r} holds more than tensors", got=one_line(error), expected="a dict of tensors",
            fix="convert it to safetensors where it is trusted",
        ) from error  # fmt: skip
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ConfigError(f"{str(file)!r} is not a dict of tensors", got=type(loaded).__name__)
    return {str(key): value for key, value in loaded.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
