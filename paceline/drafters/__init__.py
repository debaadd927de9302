"""Drafters, one file per method. CONTRIBUTING.md explains how to add one."""

from importlib import import_module
from typing import TYPE_CHECKING

from .registry import REGISTRY as REGISTRY
from .registry import DrafterSpec as DrafterSpec

_HOME = {
    "Blockwise": "parallel_heads", "Choose": "choose", "DFlash": "dflash", "DraftModel": "draft_model",
    "Eagle": "eagle", "JumpForward": "jump_forward", "Lookahead": "lookahead", "Medusa": "parallel_heads",
    "Ouroboros": "ouroboros", "Plain": "plain", "PredictedOutput": "predicted_output", "PromptLookup": "prompt_lookup",
    "SelfQuantized": "self_quantized", "Space": "space", "Suffix": "suffix", "TokenRecycling": "token_recycling",
}  # fmt: skip
__all__ = ["REGISTRY", "DrafterSpec", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOME:  # loaded on first use, so that options are read before torch is
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:  # the same names for type checkers, which take "as" for public
    from .choose import Choose as Choose
    from .dflash import DFlash as DFlash
    from .draft_model import DraftModel as DraftModel
    from .eagle import Eagle as Eagle
    from .jump_forward import JumpForward as JumpForward
    from .lookahead import Lookahead as Lookahead
    from .ouroboros import Ouroboros as Ouroboros
    from .parallel_heads import Blockwise as Blockwise
    from .parallel_heads import Medusa as Medusa
    from .plain import Plain as Plain
    from .predicted_output import PredictedOutput as PredictedOutput
    from .prompt_lookup import PromptLookup as PromptLookup
    from .self_quantized import SelfQuantized as SelfQuantized
    from .space import Space as Space
    from .suffix import Suffix as Suffix
    from .token_recycling import TokenRecycling as TokenRecycling
