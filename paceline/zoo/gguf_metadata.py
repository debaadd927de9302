"""Read a GGUF file's header: open it, ask for its values by key, refuse what is damaged or missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DownloadError

if TYPE_CHECKING:
    from gguf import GGUFReader


def open_gguf(path: Path) -> "GGUFReader":
    """Map the file into memory and parse its header. Raises DownloadError when it is cut short or no GGUF file."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    # What the reader's array slicing runs into at the end of a file that is too short.
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise DownloadError(
            f"the GGUF file {path.name} cannot be read: it is cut short or damaged",
            got=f"{path.stat().st_size:,} bytes ({error})",
            expected="a whole GGUF file",
            fix="delete it and download it again",
        ) from error


@dataclass(frozen=True)
class Metadata:
    """The key-value pairs of a GGUF file."""

    reader: "GGUFReader"

    def get(self, key: str) -> Any:
        """The value, or None when the file has none."""
        field = self.reader.fields.get(key)
        return None if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The value. Raises ConfigError when the file has none."""
        value = self.get(key)
        if value is None:
            raise ConfigError("the GGUF file lacks a value", got=f"no {key}", fix="use a complete GGUF file")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value as one number; Raises ConfigError for a list, e.g. a head count for each layer."""
        value = self.require(key) if default is None else self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unsupported(key, repr(value), "one number")
        return value


def unsupported(what: str, got: object, expected: str) -> ConfigError:
    """The error for a GGUF file that is sound, but not one we can convert."""
    return ConfigError(
        f"this GGUF file cannot be converted: {what}",
        got=got,
        expected=expected,
        fix="use the model's original Hugging Face folder",
    )
