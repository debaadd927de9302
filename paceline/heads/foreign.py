"""Read heads that others published: EAGLE, EAGLE-3 as vLLM and SGLang serve it, speculators, Medusa.

Their config.json does not say which target they were trained for. Sizes must match and copies of the target's
embeddings are compared; beyond that a wrong target shows only in what is accepted, never in the answers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.interfaces import ModelFacts
from ..errors import ConfigError, IncompatibleModels
from ..hf.checkpoint import refused
from .foreign_eagle import read_eagle, read_eagle3
from .foreign_files import Published, Target, read_published
from .foreign_medusa import read_medusa
from .foreign_speculators import flattened

_MEDUSA_NAME = re.compile(r"(medusa_heads\.|medusa_head\.)?\d+\.\d+\.|blocks\.\d+\.|lm_heads\.\d+\.")


def read_foreign(folder: Path | str, target: ModelFacts | None = None) -> nn.Module:
    """The head at `folder` as one of our modules; for a target in its dtype, on its device, else in float32.

    target: needed wherever the published config.json leaves out what only the target knows (its depth).
    Raises `ConfigError` for files that do not fit their layout, `IncompatibleModels` for a feature our modules lack
    or a head of another size than the target.
    """
    if target is None:
        return read_for(Path(folder), None).float()
    return read_for(Path(folder), target_of(target)).to(device=target.device, dtype=target.dtype)


def read_for(folder: Path, target: Target | None, engine: str | None = None) -> nn.Module:
    """`read_foreign` for a target known only by its sizes. engine: whose count of layers is to be taken, if known."""
    with torch.random.fork_rng(devices=[]):  # a module's first weights use up random numbers
        published = read_published(folder)
        with refused(f"the head at {str(folder)!r} has a config.json or tensors that do not fit"):
            module = _read(published, target, engine)
    if target is not None:
        _compare_sizes(folder, module, target)
    return module.eval().requires_grad_(False)


def _read(published: Published, target: Target | None, engine: str | None) -> nn.Module:
    config = published.config
    if "speculators_model_type" in config:
        published.config = flattened(config)
        return read_eagle3(published, target, engine)
    elif config.get("model_type") == "medusa" or any(_MEDUSA_NAME.match(name) for name in published.tensors):
        return read_medusa(published, target)
    elif any(name.endswith(".hidden_norm.weight") for name in published.tensors):
        return read_eagle3(published, target, engine)
    elif "fc.weight" in published.tensors:
        return read_eagle(published, target)
    else:
        raise _unknown(published)


def target_of(loaded: ModelFacts) -> Target:
    """What the readers use of a loaded target."""
    model = loaded.model
    return Target(
        loaded.num_layers,
        loaded.hidden_size,
        loaded.vocab_size,
        model.get_input_embeddings().weight,  # type: ignore[union-attr, arg-type]
        getattr(model.get_output_embeddings(), "weight", None),
    )


def _compare_sizes(folder: Path, module: nn.Module, target: Target) -> None:
    config: Any = module.config
    hidden = getattr(config, "target_hidden_size", config.hidden_size)
    got: Mapping[str, int] = {"hidden size": hidden, "vocabulary": config.vocab_size}
    expected: Mapping[str, int] = {"hidden size": target.hidden_size, "vocabulary": target.vocab_size}
    if got != expected:
        raise IncompatibleModels(
            f"the head at {str(folder)!r} is for another target",
            got=_told(got),
            expected=_told(expected),
            fix="name the target that the head was trained for",
        )


def _told(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _unknown(published: Published) -> ConfigError:
    return ConfigError(
        f"the head at {str(published.folder)!r} has a layout that is not known",
        got="tensors " + ", ".join(sorted(published.tensors)[:8]),
        expected="a head of Paceline, EAGLE, EAGLE-3, speculators or Medusa",
    )
