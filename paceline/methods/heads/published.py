"""Heads as others publish them: they are read by the methods' layouts, which share what is below.

A reader gets a `Published`, the target, and the engine whose way to count layers applies, if known; it returns None for
files of another layout. Their config.json does not say which target they were trained for. Sizes must match; beyond
that a wrong target shows only in fewer accepted tokens, never in the answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...errors import ConfigError, IncompatibleModels, NotExportable
from ...hf.checkpoint import refused, weight_files
from ...hf.gguf.file import SUFFIX, GGUFFile, read_gguf
from ...hf.settings import check_settings
from ...system.files import read_object
from ...target.loaded import LoadedModel
from ..method import named
from ..table import rows
from .parts import check_sizes, filled

WEIGHT_FILES = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Where published heads keep their tensors, the safe format first."""

CONTEXT = 131072  # where the target is not loaded: rotary tables reach as far, and engines cut to the target's
_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class TargetFacts:
    """What is known of the target of a head: a published config.json often leaves it out.

    name: what an engine is to serve. architectures: as the target's config.json has them; empty where it is not
    loaded. context: the most tokens of a sequence. lm_head, embeddings: its tables [V, E], if loaded. tokens: the
    entries of its tokenizer in a GGUF file, where one is written.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    architectures: tuple[str, ...] = ()
    context: int | None = None
    lm_head: Tensor | None = None
    embeddings: Tensor | None = None
    tokens: Mapping[str, Any] | None = None


def facts_of(loaded: LoadedModel, name: str = "") -> TargetFacts:
    """The facts of a loaded target. name: what an engine is to serve; default: its own."""
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
    """A published head. Readers change names and tensors until they are ours.

    file: that of a head in a GGUF file, which is then `folder`; config and tensors are not read yet.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    file: GGUFFile | None = None

    @property
    def architecture(self) -> str:
        """That of a GGUF file."""
        return "" if self.file is None else self.file.architecture

    @property
    def name(self) -> str:
        """Of its config.json or metadata, in errors."""
        return f"{'metadata' if self.file else 'config.json'} of the head at {str(self.folder)!r}"

    def build(self, kind: Callable[..., _M], config: object, draft_ids: Tensor) -> _M:
        """Our module of this configuration from all tensors, in the narrowest dtype that holds them.

        draft_ids: target id of each draft token, in the file's order: output rows are sorted by them. Raises
        `ConfigError` as `filled` does.
        """
        order = torch.argsort(draft_ids)
        rows = "lm_head.", "markov_head.markov_w2."  # of the draft vocabulary
        state = {name: tensor[order] if name.startswith(rows) else tensor for name, tensor in self.tensors.items()}
        module = filled(kind, config, {**state, "draft_ids": draft_ids[order]}, self.folder)
        # Files mix halves with output rows in float32.
        return module.to(reduce(torch.promote_types, {parameter.dtype for parameter in module.parameters()}))


def read_published(place: Path, target: TargetFacts, engine: str | None = None) -> nn.Module:
    """The head in a folder or a GGUF file, as one of our modules. engine: as of a reader.

    Raises `ConfigError` for files that do not fit their layout, `IncompatibleModels` for a feature our modules lack
    or a head of another size than the target.
    """
    published = open_published(place)
    layouts = dict.fromkeys(row.layouts for row in reversed(rows()) if row.layouts)
    with refused(f"the head at {str(place)!r} has a config.json or tensors that do not fit"):
        readings = (named(f"{module}:read")(published, target, engine) for module in layouts)
        module = next((reading for reading in readings if reading is not None), None)
    if module is None:
        held = f"architecture {published.architecture!r}", "tensors " + ", ".join(sorted(published.tensors)[:8])
        raise ConfigError(
            f"the head at {str(place)!r} has a layout that is not known", got=held[published.file is None],
            expected="a head of Paceline, " + ", ".join(row.title for row in rows() if row.layouts),
            fix="name a draft model as model:FILE.gguf" if published.file else None,
        )  # fmt: skip
    config: Any = module.config
    hidden = getattr(config, "target_hidden_size", config.hidden_size)
    of_head = {"hidden_size": hidden, "vocab_size": config.vocab_size}
    of_target = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    fix = "name the target that the head was trained for"
    check_sizes(f"the head at {str(place)!r} is for another target", of_head, of_target, fix)
    return module


def renamed(tensors: Mapping[str, Tensor], new_name: Callable[[str], str], place: Path) -> dict[str, Tensor]:
    """Tensors under other names. Raises `ConfigError` for two of one name."""
    tensors_by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (new := new_name(name)) in tensors_by_name:
            raise ConfigError(f"{str(place)!r} holds a tensor twice", got=f"{name} and another name of {new}")
        tensors_by_name[new] = tensor
    return tensors_by_name


def lacks(published: Published, module: str, feature: str, expected: str) -> IncompatibleModels:
    """The error for a head with a feature that our module does not have."""
    message = f"the head at {str(published.folder)!r} has what Paceline's {module} module lacks"
    fix = None if published.file else "remove from its config.json what changes no number"
    return IncompatibleModels(message, got=feature, expected=expected, fix=fix)


def is_copy(table: Tensor, target: Tensor | None) -> bool:
    """True if a table of the head is the target's. Heads are stored in half precisions: a copy differs by rounding."""
    if target is None or table.shape != target.shape:
        return False
    return torch.allclose(table.float(), target.to(table.device).float(), rtol=2**-7, atol=1e-6)


def check_states(published: Published, states: Sequence[int], target: TargetFacts) -> None:
    """Raise `IncompatibleModels` for states that the target lacks, or has only behind its final norm."""
    if not all(0 <= state < target.num_layers for state in states):
        message = f"the head at {str(published.folder)!r} reads states that the target lacks"
        expected = f"0 to {target.num_layers - 1}, below the final norm"
        raise IncompatibleModels(message, got=list(states), expected=expected)


def owns_table(published: Published, name: str, rows: int, target: Tensor | None) -> bool:
    """True if the head brings this table; a copy of the target's is dropped, since the target's is used."""
    table = published.tensors.get(name)
    if table is None:
        return False
    if len(table) != rows or not is_copy(table, target):
        return True
    del published.tensors[name]
    return False


def ids_of_drafts(published: Published, size: int, vocab_size: int) -> Tensor:
    """Target id of each draft token by d2t, which is taken out of the tensors; in the file's order. [Vd].

    size: of the draft vocabulary. Raises `ConfigError` for a vocabulary that is not sound.
    """
    named, offsets = published.tensors.pop("t2d", None), published.tensors.pop("d2t", None)
    if offsets is None and size == vocab_size:
        offsets = torch.zeros(size, dtype=torch.long)
    ids, wrong = torch.arange(size), None
    if offsets is None or offsets.shape != (size,) or offsets.is_floating_point():
        wrong = f"no offsets of {size} tokens"
    elif not bool((((ids := ids + offsets.long()) >= 0) & (ids < vocab_size)).all()):
        wrong = "ids outside the vocabulary"
    elif len(ids.unique()) != size:
        wrong = "ids that occur twice"
    elif named is not None and (
        named.numel() != vocab_size or set(named.nonzero()[:, 0].tolist()) != set(ids.tolist())
    ):
        wrong = "ids other than t2d has"
    if wrong is not None:
        raise ConfigError(
            f"the draft vocabulary of the head at {str(published.folder)!r} is not sound",
            got=f"d2t gives {wrong}",
            expected="offsets: the target's id of draft token i is i + d2t[i]",
        )
    return ids


def draft_tables(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t and t2d of a draft vocabulary."""
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True),
    }


def open_published(folder: Path) -> Published:
    """Config and tensors of a published head, or its GGUF file.

    Raises `ConfigError` for files that are not there or cannot be read.
    """
    if folder.suffix == SUFFIX:
        return Published(folder, {}, {}, read_gguf(folder))
    config = read_object(folder / "config.json")
    check_settings(f"config.json of the head at {str(folder)!r}", config)
    for name in WEIGHT_FILES:
        if files := weight_files(folder, name):
            tensors: dict[str, Tensor] = {}
            for file in files:
                part = read_tensors(file)
                if again := part.keys() & tensors.keys():
                    raise ConfigError(f"two files of {str(folder)!r} hold a tensor of the same name", got=min(again))
                tensors |= part
            return Published(folder, config, tensors)
    raise ConfigError(
        f"no weights at {str(folder)!r}", got=", ".join(sorted(path.name for path in folder.iterdir())),
        expected="one of " + ", ".join(WEIGHT_FILES),
    )  # fmt: skip


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a pickle that holds nothing else. Raises `ConfigError`.

    EAGLE-3's repository calls the first layer of a head `midlayer`, where others count layers; so does this.
    """
    return renamed(_tensors(file), lambda name: name.replace("midlayer.", "layers.0."), file)


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with refused(f"{str(file)!r} cannot be read", fix="fetch it again"):
            return load_file(file)
    message = f"{str(file)!r} is cut off, or holds more than tensors"
    fix = "convert it to safetensors where it is trusted"
    with refused(message, "a dict of tensors", fix):
        # Pickles of others run code when they are opened; this reads tensors and nothing else.
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
        if not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ConfigError(message, got="values of other kinds", expected="a dict of tensors", fix=fix)
        return {str(key): value for key, value in loaded.items()}


@dataclass(frozen=True)
class Layout:
    """A folder to be written: config.json, the tensors of model.safetensors, other files, and how it is served.

    For llama.cpp, config is the metadata of a file that also holds the tensors.

    serve: the command; {target} and {folder} stand for their places. notes: what the engine does otherwise than
    Paceline, one sentence each. ids: an index written as a file of its own, by file name.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    serve: str
    notes: tuple[str, ...] = ()
    ids: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])


def refuse_if(has: bool, engine: str, feature: str, fix: str | None = None) -> None:
    """Raise `NotExportable` for a head with a feature that an engine's layout cannot hold."""
    if has:
        raise NotExportable(f"{engine} cannot hold this head", got=feature, fix=fix)


def stored(tensor: Tensor) -> Tensor:
    """The tensor as it is written: in bfloat16 where that loses nothing, as for every head trained here."""
    tensor = tensor.detach().cpu()
    half = tensor.to(torch.bfloat16)
    return (half if torch.equal(half.to(tensor.dtype), tensor) else tensor).clone().contiguous()


def stored_weights(head: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the head but `draft_ids`, as it is written."""
    return {name: stored(tensor) for name, tensor in head.state_dict().items() if name != "draft_ids"}


def target_rows(engine: str, facts: TargetFacts, draft_ids: Tensor) -> Tensor:
    """The target's output rows of the draft vocabulary, as they are written. Raises `NotExportable` without them."""
    rows = facts.lm_head
    refuse_if(rows is None, engine, "a head that stores only which of the target's output rows it uses", "name --model")
    assert rows is not None
    return stored(rows[draft_ids.to(rows.device)])


def vllm_command(method: str, num_tokens: int) -> str:
    """How vLLM serves the folder."""
    spec = f'{{"method": "{method}", "model": "{{folder}}", "num_speculative_tokens": {num_tokens}}}'
    return f"vllm serve {{target}} --speculative-config '{spec}'"
