"""Drafters, one file per method. CONTRIBUTING.md explains how to add one."""

from importlib import import_module
from typing import TYPE_CHECKING

from .table import REGISTRY as REGISTRY
from .table import DrafterSpec as DrafterSpec

_HOME = {
    "Blockwise": "parallel.drafter",
    "Choose": "choose",
    "DFlash": "dflash.drafter",
    "DraftModel": "draft_model.drafter",
    "Eagle": "eagle.drafter",
    "JumpForward": "jump_forward",
    "Lookahead": "lookahead",
    "Medusa": "parallel.drafter",
    "Ouroboros": "ouroboros",
    "Plain": "plain",
    "PredictedOutput": "prediction",
    "PromptLookup": "lookup",
    "SelfQuantized": "self_int4.drafter",
    "Space": "space.drafter",
    "Suffix": "suffix.drafter",
    "TokenRecycling": "recycling",
}
__all__ = ["REGISTRY", "DrafterSpec", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOME:  # loaded on first use, so that options are read before torch is
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:  # the same names for type checkers, which take "as" for public
    from .choose import Choose as Choose
    from .dflash.drafter import DFlash as DFlash
    from .draft_model.drafter import DraftModel as DraftModel
    from .eagle.drafter import Eagle as Eagle
    from .jump_forward import JumpForward as JumpForward
    from .lookahead import Lookahead as Lookahead
    from .lookup import PromptLookup as PromptLookup
    from .ouroboros import Ouroboros as Ouroboros
    from .parallel.drafter import Blockwise as Blockwise
    from .parallel.drafter import Medusa as Medusa
    from .plain import Plain as Plain
    from .prediction import PredictedOutput as PredictedOutput
    from .recycling import TokenRecycling as TokenRecycling
    from .self_int4.drafter import SelfQuantized as SelfQuantized
    from .space.drafter import Space as Space
    from .suffix.drafter import Suffix as Suffix
