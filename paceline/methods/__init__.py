"""Drafters: a file or a folder for each method, listed in `table`. CONTRIBUTING.md explains how to add one."""

from typing import TYPE_CHECKING, Any

from .method import named
from .table import METHODS

if TYPE_CHECKING:
    from .method import Method as Method
    from .spec import DrafterSpec as DrafterSpec

_HOME = {row.drafter: row.home for row in METHODS.values()} | {"DrafterSpec": ".spec", "Method": ".method"}
__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:  # loaded on first use, so that options are read before torch is
        return named(f"{_HOME[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
