"""What a self-draft skips: the set, its file, and the module tree without it."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...errors import ConfigError, IncompatibleModels
from ...hf.skipped import FirstRows, Skipped, sublayers
from ...schema import Many, checked, validate
from ...system.files import read_kind, to_json, write_text
from ...target.adapters import decoder_layers
from ...target.loaded import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel
KIND, VERSION = "paceline-skips", 1
Layers = Many[Annotated[int, Field(ge=0)]]
Vocabulary = Annotated[int, Field(ge=1)]


@checked
class Skips:
    """The layers whose attention is skipped, those whose MLP is, and how many first tokens are drafted; None: all."""

    attention: Layers = ()
    mlp: Layers = ()
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            layers: tuple[int, ...] = getattr(self, name)
            if len(set(layers)) < len(layers):
                raise ConfigError(f"{name} names a layer twice", got=list(layers), expected="each layer once")

    @staticmethod
    def of(indices: Iterable[int], vocabulary: int | None = None) -> "Skips":
        """From indices of `target.sublayers`."""
        held = sorted(indices)
        return Skips(tuple(i // 2 for i in held if not i % 2), tuple(i // 2 for i in held if i % 2), vocabulary)


def leave_out(model: "PreTrainedModel", skips: Skips) -> None:
    """Skip sub-layers of a module tree. Raises `ConfigError` for layers that it lacks, and as `sublayers`."""
    count = int(model.config.get_text_config().num_hidden_layers)
    layers: Sequence[Any] = [*decoder_layers(model, count)]
    names = sublayers(layers)
    for part, (name, skipped) in enumerate((("attention", skips.attention), ("mlp", skips.mlp))):
        if beyond := [layer for layer in skipped if layer >= count]:
            raise ConfigError(f"{name} names a layer that the target lacks", got=beyond, expected=f"0 to {count - 1}")
        for layer in skipped:
            place = names[layer][part]
            layers[layer].add_module(place, Skipped(layers[layer].get_submodule(place), is_attention=not part))
    if skips.vocabulary is not None:
        head: Any = model.get_output_embeddings()
        if skips.vocabulary > head.out_features:
            got, expected = skips.vocabulary, f"at most {head.out_features}"
            raise ConfigError("the draft would have more tokens than its target", got=got, expected=expected)
        model.set_output_embeddings(FirstRows(head, skips.vocabulary))


def write_skips(path: str | os.PathLike[str], skips: Skips, target: LoadedModel, **facts: object) -> None:
    """Write a set as JSON, with facts of how it was found. Raises OSError."""
    head = {"kind": KIND, "version": VERSION, "model": target.name, "fingerprint": target.fingerprint}
    write_text(os.fspath(path), to_json({**head, **asdict(skips), **facts}, indent=1) + "\n")


def read_skips(path: str | os.PathLike[str], target: LoadedModel) -> Skips:
    """Read such a file. Raises `ConfigError` for anything else, and `IncompatibleModels` for another target's."""
    path = os.fspath(path)
    content = read_kind(path, KIND, VERSION, 'write {"attention": [...], "mlp": [...]} in --speculative-config')
    if content.get("fingerprint") != target.fingerprint:
        raise IncompatibleModels(
            f"the skipped layers of {path!r} were chosen for another model",
            got=f"{target.name}, {target.fingerprint[:12]}",
            expected=f"{content.get('model')}, {str(content.get('fingerprint'))[:12]}",
            fix="leave the file out, and they are chosen for this one",
        )  # fmt: skip
    return validate(Skips, {field.name: content.get(field.name) for field in fields(Skips)}, path)
