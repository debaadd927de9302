"""Trained draft heads and small vision-language models for Paceline, one folder each; see `README.md`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .vlm import PackagedVlm

FOLDER = Path(__file__).parent
DEFAULTS = {"smollm2-135m-dflash": "lookup+head:smollm2-135m-dflash"}
"""The recommended heads, one for a target, and the drafter of `paceline demo` with each; chosen by measurement."""


def models() -> "dict[str, Callable[[], PackagedVlm]]":
    """The vision-language models by name, each with the function that reads its description."""
    from .vlm import ABOUT, read_vlm

    return {path.parent.name: partial(read_vlm, path.parent) for path in sorted(FOLDER.glob(f"*/{ABOUT}"))}
