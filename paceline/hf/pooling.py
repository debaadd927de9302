"""How a model's files say that its embeddings are made: those of sentence-transformers, or an entry of a GGUF file.

modules.json                a list of modules, of which the first is the model itself
1_Pooling/config.json       one "pooling_mode_..." that is true; cls_token, lasttoken and mean_tokens for example
2_Normalize                 where the list has it, embeddings have length 1
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

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
    if (number := getattr(model.config, "pooling_type", None)) is not None:
        name = _GGUF[number]
        return Declared() if name == "none" else Declared(_checked(name, files))
    folder = Path(files or ".")
    if not files or not (folder / MODULES).is_file():
        return Declared()
    kinds = [_kind(module) for module in _modules(folder)]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise _refused(f"a module {brief(unknown[0])}", "Transformer, Pooling and Normalize", files)
    if "Pooling" not in kinds:
        return Declared(None, "Normalize" in kinds)
    config = read_object(folder / POOLING_FILE, "fetch the model again, with this file")
    modes = [name.removeprefix(_MODE) for name, value in config.items() if name.startswith(_MODE) and value]
    if "pooling_mode" in config:
        modes.append(str(config["pooling_mode"]))
    if len(modes) != 1:
        raise _refused(f"{' and '.join(modes) or 'no'} pooling", "one", files)
    return Declared(_checked(modes[0], files), "Normalize" in kinds)


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
    return ConfigError(
        f"the embeddings of {files!r} are made in a way that is not known here", got=got, expected=expected,
        fix='give pooling="last" or "mean", if you know that the model was trained for it',
    )  # fmt: skip
