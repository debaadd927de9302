"""Libraries that only training needs."""

from importlib import import_module
from types import ModuleType

from ..errors import ConfigError


def need(name: str, what: str, fix: str = "pip install 'paceline[train]'") -> ModuleType:
    """The library of this name. what: needs it. Raises `ConfigError` where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{what} needs {name}", got=str(error), fix=fix) from error
