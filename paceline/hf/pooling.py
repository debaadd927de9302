"""How a model's files say that its embeddings are made: those of sentence-transformers, or an entry of a GGUF file.

modules.json                a list of modules, of which the first is the model itself
1_Pooling/config.json       one "pooling_mode_..." that is true; cls_token, lasttoken and mean_tokens for example
2_Normalize                 where the list has it, embeddings have length 1
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from transformers import PretrainedConfig

from ..errors import ConfigError
from ..schema import brief
from ..system.files import parse_json, read_object, read_text
from .classes import PreTrainedModel

Pooling: TypeAlias = Literal["last", "mean"]
MODULES = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
_MODE = "pooling_mode_"
_KNOWN: Mapping[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "last": "last", "mean": "mean"}
_GGUF = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


class Declared(NamedTuple):
    """The pooling of a model, None where nothing says it, and whether its embeddings have length 1."""

    pooling: Pooling | None = None
    normalize: bool = True


def declared(files: str, model: PreTrainedModel) -> Declared:
    """What the files of a model say. Raises `ConfigError` for what is not computed here, such as pooling "cls".

    files: see `LoadedModel.files`.
    """
    config = model.config.get_text_config()
    is_causal = getattr(config, "is_causal", None) is not False
    if not is_causal or getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise _refused("attention in both directions", "causal attention", files)
    if (number := getattr(config, "pooling_type", None)) is not None:
        name = _GGUF[number]
        return Declared() if name == "none" else Declared(_checked(name, files))
    return _of_folder(files) if files and (Path(files) / MODULES).is_file() else Declared()


@lru_cache(16)  # a request of many texts asks for each
def _of_folder(files: str) -> Declared:
    kinds = [_kind(module) for module in _modules(Path(files))]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise _refused(f"a module {brief(unknown[0])}", "Transformer, Pooling and Normalize", files)
    if "Pooling" not in kinds:
        return Declared(None, "Normalize" in kinds)
    said = read_object(Path(files) / POOLING_FILE, "fetch the model again, with this file")
    modes = [name.removeprefix(_MODE) for name, value in said.items() if name.startswith(_MODE) and value]
    modes += [str(said["pooling_mode"])] if "pooling_mode" in said else []
    if len(modes) != 1:
        raise _refused(f"{' and '.join(modes) or 'no'} pooling", "one", files)
    return Declared(_checked(modes[0], files), "Normalize" in kinds)


def lacks_head(config: PretrainedConfig, stored: Collection[str]) -> bool:
    """Whether a checkpoint holds layers without an output layer, as those of embedding models may.

    Such a model gets its embeddings as one, which nobody reads: see `SpeculativeDecoder.admit`.
    """
    return (
        _is_named(config, "Model")
        and not config.tie_word_embeddings
        and not any(key.endswith("lm_head.weight") for key in stored)
    )


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether a checkpoint is of an encoder, as BERT, whose layers would also run as a decoder."""
    return getattr(config, "is_decoder", None) is False and _is_named(config, "Model", "ForMaskedLM")


def _is_named(config: PretrainedConfig, *ends: str) -> bool:
    return any(name.endswith(ends) for name in cast("list[str]", config.architectures or []))


def _modules(folder: Path) -> list[dict[str, Any]]:
    value = parse_json(read_text(folder / MODULES), f"the file {str(folder / MODULES)!r}")
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast("list[object]", value)):
        raise ConfigError(f"{str(folder / MODULES)!r} is no list of modules", fix="fetch the model again")
    return cast("list[dict[str, Any]]", value)


def _kind(module: dict[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _checked(mode: str, files: str) -> Pooling:
    if mode not in _KNOWN:
        raise _refused(f"pooling {brief(mode)}", "last or mean", files)
    return _KNOWN[mode]


def _refused(got: str, expected: str, files: str) -> ConfigError:
    message = f"the embeddings of {files!r} are made in a way that is not known here"
    fix = "give pooling and normalize, if you know that those of the causal model itself are wanted"
    return ConfigError(message, got=got, expected=expected, fix=fix)
