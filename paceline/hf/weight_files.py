"""The safetensors files of a model folder, and what their headers say before anything of them is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

from ..errors import ConfigError
from ..schema import validate
from ..system.files import read_json

SAFE = ".safetensors"
WEIGHTS = "model" + SAFE


@dataclass(frozen=True)
class Stored:
    """A tensor as a header describes it. dtype: in the words of safetensors, for example BF16."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether it holds real floating-point numbers."""
        return self.dtype.startswith(("F", "BF"))


def weight_files(folder: Path, name: str = WEIGHTS) -> list[Path]:
    """The file `name` of a folder, or those that `name`.index.json lists; empty where there is neither.

    Raises `ConfigError` for an index that leads out of its folder, or to files of another format than `name`'s.
    """
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        return []
    content = read_json(index, "the index")
    listed = content.get("weight_map") if isinstance(content, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    parts = sorted(set(validate(dict[str, str], listed, f'"weight_map" of {str(index)!r}').values()))
    suffix = Path(name).suffix
    for part in parts:
        if part != Path(part).name or "\\" in part or Path(part).suffix != suffix:
            raise ConfigError(
                f"the index {str(index)!r} names a file that is not opened", got=repr(part),
                expected=f"files of kind {suffix} in the same folder",
                fix="fetch the model again, or convert its weights to safetensors where they are trusted",
            )  # fmt: skip
        if not (folder / part).is_file():
            raise ConfigError(f"{part} is missing in {str(folder)!r}", got="no such file", fix="fetch the model again")
    if not parts:
        raise ConfigError(f"the index {str(index)!r} names no files", fix="fetch the model again")
    return [folder / part for part in parts]


def read_headers(files: Sequence[Path]) -> Mapping[str, Stored]:
    """Every tensor of safetensors files by name; no numbers are read. Raises `ConfigError` for a damaged file."""
    from safetensors import SafetensorError, safe_open

    stored: dict[str, Stored] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in cast("list[str]", file.keys()):
                    part = file.get_slice(name)
                    stored[name] = Stored(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(
                f"{str(path)!r} cannot be read", got=error, expected="a whole safetensors file", fix="fetch it again"
            ) from error
    return stored
