"""A head in the layout of another project: its files read strictly, or what is to be written.

`eagle_layouts` and `medusa_layouts` hold one layout each, in both directions; `exchange` chooses between them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..core.interfaces import ModelFacts
from ..errors import ConfigError, NotExportable
from ..hf.checkpoint import one_line, weight_files
from ..system.files import exists, read_json

WEIGHT_FILES = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Where published heads keep their tensors, the safe format first."""

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class TargetFacts:
    """What is known of the target of a head: a published config.json often leaves it out.

    name: what an engine is asked to serve. architectures: as the target's config.json has them; empty where it is not
    loaded. context: the most tokens of a sequence. lm_head, embeddings: its tables [V, E], if loaded.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    architectures: tuple[str, ...] = ()
    context: int | None = None
    lm_head: Tensor | None = None
    embeddings: Tensor | None = None


def facts_of(loaded: ModelFacts, name: str = "") -> TargetFacts:
    """The facts of a loaded target. name: what an engine is asked to serve; default: its own."""
    model = loaded.model
    return TargetFacts(
        name or loaded.name,
        loaded.num_layers,
        loaded.hidden_size,
        loaded.vocab_size,
        tuple(getattr(model.config, "architectures", None) or (type(model).__name__,)),
        loaded.context,
        getattr(model.get_output_embeddings(), "weight", None),
        loaded.embeddings,
    )


@dataclass
class Published:
    """A published head. Tensors are taken one by one; `finish` raises if any was missing, misshapen or left over."""

    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    problems: list[str] = field(default_factory=list[str])

    def take(self, name: str, shape: tuple[int, ...], floats: bool = True) -> Tensor:
        """The tensor of that name, of floats or integers; a meta tensor if it does not fit: `finish` raises then."""
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

    def build(self, kind: Callable[..., _M], config: object, draft_ids: Tensor, rename: Callable[[str], str]) -> _M:
        """Our module of this configuration from all tensors that are left, in the narrowest dtype that holds them.

        draft_ids: target id of each draft token, in the file's order: output rows are sorted by them. rename: from our
        name of a tensor to the published one. Raises `ConfigError` as `finish` does.
        """
        with torch.device("meta"):  # shapes only
            shapes = kind(config).state_dict()
        del shapes["draft_ids"]
        state = {name: self.take(rename(name), tuple(one.shape)) for name, one in shapes.items()}
        self.finish()
        order = torch.argsort(draft_ids)
        state = {name: one[order] if name.startswith("lm_head") else one for name, one in state.items()}
        state["draft_ids"] = draft_ids[order]
        module = kind(config, state["draft_ids"])
        module.load_state_dict(state)
        return module.to(_common_dtype(state.values()))


def need_target(published: Published, target: TargetFacts | None, why: str) -> TargetFacts:
    """The target. Raises `ConfigError` where it is not known."""
    if target is None:
        raise ConfigError(
            f"the head at {str(published.folder)!r} cannot be read without its target", got=why, fix="name the target"
        )
    return target


def is_copy(table: Tensor, target: Tensor | None) -> bool:
    """True if a table of the head is the target's. Heads are stored in half precisions: a copy differs by rounding."""
    if target is None or table.shape != target.shape:
        return False
    return torch.allclose(table.float(), target.to(table.device).float(), rtol=2**-7, atol=1e-6)


def _common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The narrowest float type that holds them all: files mix halves with output rows in float32."""
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors if tensor.is_floating_point()})


def open_published(folder: Path) -> Published:
    """Config and tensors of a published head. Raises `ConfigError` for files that are not there or cannot be read."""
    if not exists(folder / "config.json"):
        raise ConfigError(
            f"no head at {str(folder)!r}", got="no config.json",
            expected="a folder with config.json and the head's weights",
        )  # fmt: skip
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"config.json of {str(folder)!r} is not an object", got=type(config).__name__)
    for name in WEIGHT_FILES:
        if files := weight_files(folder, name):
            tensors = {key: value for file in files for key, value in _load(file).items()}
            return Published(folder, config, tensors)  # pyright: ignore[reportUnknownArgumentType]
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


@dataclass(frozen=True)
class Layout:
    """A folder to be written: config.json, the tensors of model.safetensors, other files, and how it is served.

    serve: the command; {target} and {folder} stand for their places. notes: what the engine does otherwise than
    Paceline, one sentence each. ids: an index written as a file of its own, by file name.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    serve: str
    notes: tuple[str, ...] = ()
    ids: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])


def refuse(engine: str, what: str, fix: str | None = None) -> NotExportable:
    """The error for a feature that an engine's layout cannot hold."""
    return NotExportable(f"{engine} cannot hold this head", got=what, fix=fix)


def stored(tensor: Tensor) -> Tensor:
    """The tensor as it is written: in bfloat16 where that loses nothing, as for every head trained here."""
    tensor = tensor.detach().cpu()
    half = tensor.to(torch.bfloat16)
    return (half if torch.equal(half.to(tensor.dtype), tensor) else tensor).clone().contiguous()


def stored_weights(head: nn.Module, rename: Callable[[str], str] = str) -> dict[str, Tensor]:
    """Every tensor of the head but `draft_ids`, as it is written. rename: from our name to the published one."""
    return {rename(name): stored(tensor) for name, tensor in head.state_dict().items() if name != "draft_ids"}


def target_rows(engine: str, facts: TargetFacts, draft_ids: Tensor) -> Tensor:
    """The target's output rows of the draft vocabulary, as they are written. Raises `NotExportable` without them."""
    if facts.lm_head is None:
        raise refuse(engine, "a head that stores only which of the target's output rows it uses", "name --model")
    return stored(facts.lm_head[draft_ids.to(facts.lm_head.device)])


def vllm_command(method: str, num_tokens: int) -> str:
    """How vLLM serves the folder."""
    spec = f'{{"method": "{method}", "model": "{{folder}}", "num_speculative_tokens": {num_tokens}}}'
    return f"vllm serve {{target}} --speculative-config '{spec}'"
