"""The zoo: models Paceline can fetch by name, checked by hash, as plain Hugging Face folders."""

from .catalog import Installed, installed, resolve
from .fetch import Progress
from .manifest import Manifest, verify
from .packaged import PackagedVlm
from .pull import models_dir, pull
from .registry import DEFAULT_MODEL, ZOO, ZooEntry, ZooModel

__all__ = [
    "DEFAULT_MODEL",
    "ZOO",
    "Installed",
    "Manifest",
    "PackagedVlm",
    "Progress",
    "ZooEntry",
    "ZooModel",
    "installed",
    "models_dir",
    "pull",
    "resolve",
    "verify",
]
