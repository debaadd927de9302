"""Trained draft heads and small models for Paceline, one folder each; see `README.md`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.zoo.entry import ZooEntry

FOLDER = Path(__file__).parent
DEFAULTS = {"smollm2-135m-dflash": "lookup+head:smollm2-135m-dflash"}
"""The recommended heads, one for a target, and the drafter of `paceline demo` with each; chosen by measurement."""


def models() -> "dict[str, Callable[[], ZooEntry]]":
    """The models by name, each with the function that reads its description."""
    from . import vlm, whole

    kinds = ((vlm.ABOUT, vlm.read_vlm), (whole.ABOUT, whole.read_model))
    return {file.parent.name: partial(read, file.parent) for about, read in kinds for file in FOLDER.glob(f"*/{about}")}
