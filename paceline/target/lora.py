"""The LoRA adapters of a model, by name."""

from pathlib import Path
from typing import Any, final

from ..errors import ConfigError
from ..schema import brief

MAX_LORAS = 1024
"""The most adapters at the same time."""


@final
class Adapters:
    """The adapters that new requests may choose. most: how many there may be."""

    def __init__(self) -> None:
        self.most = 16
        self._by_name = dict[str, Any]()

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the order in which they came."""
        return tuple(self._by_name)

    def add(self, name: str, folder: str | Path) -> None:
        """Read an adapter."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Forget an adapter; whoever has it keeps it. Raises `ConfigError` for an unknown name."""
        self.get(name)
        del self._by_name[name]

    def get(self, name: str, folder: str | Path = "") -> Any:
        """The adapter of a name. Raises `ConfigError` for an unknown name, and where it is from another folder."""
        if name not in self._by_name:
            known = ", ".join(self.names) or "none"
            fix = "add it: add_adapter(name, folder)"
            raise ConfigError("there is no adapter of this name", got=brief(name), expected=known, fix=fix)
        return self._by_name[name]
