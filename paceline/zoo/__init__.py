"""The zoo: models that Paceline can fetch by name, checked by hash, as plain Hugging Face folders; trained heads."""

from .cache import installed, models_dir, pull, resolve, verify
from .download import ZooModel
from .entry import ZooEntry
from .registry import DEFAULT_MODEL, ZOO, name_elsewhere, remark_elsewhere

__all__ = [
    "DEFAULT_MODEL",
    "ZOO",
    "ZooEntry",
    "ZooModel",
    "installed",
    "models_dir",
    "name_elsewhere",
    "pull",
    "remark_elsewhere",
    "resolve",
    "verify",
]
