"""Drafters: one file a method. `registry` says how to add one."""

from importlib import import_module
from typing import TYPE_CHECKING

from .registry import REGISTRY, DrafterSpec

_HOME = {
    "Blockwise": "parallel_heads",
    "Choose": "choose",
    "DraftModel": "draft_model",
    "Eagle": "eagle",
    "JumpForward": "jump_forward",
    "Lookahead": "lookahead",
    "Medusa": "parallel_heads",
    "Mtp": "mtp",
    "Ouroboros": "ouroboros",
    "Plain": "plain",
    "PredictedOutput": "predicted_output",
    "PromptLookup": "prompt_lookup",
    "SelfQuantized": "self_quantized",
    "Space": "space",
    "Suffix": "suffix",
    "TokenRecycling": "token_recycling",
}

__all__ = [
    "REGISTRY",
    "Blockwise",
    "Choose",
    "DraftModel",
    "DrafterSpec",
    "Eagle",
    "JumpForward",
    "Lookahead",
    "Medusa",
    "Mtp",
    "Ouroboros",
    "Plain",
    "PredictedOutput",
    "PromptLookup",
    "SelfQuantized",
    "Space",
    "Suffix",
    "TokenRecycling",
]


def __getattr__(name: str) -> object:
    if name in _HOME:  # loaded on first use, so that options are read before torch is
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:
    from .choose import Choose
    from .draft_model import DraftModel
    from .eagle import Eagle
    from .jump_forward import JumpForward
    from .lookahead import Lookahead
    from .mtp import Mtp
    from .ouroboros import Ouroboros
    from .parallel_heads import Blockwise, Medusa
    from .plain import Plain
    from .predicted_output import PredictedOutput
    from .prompt_lookup import PromptLookup
    from .self_quantized import SelfQuantized
    from .space import Space
    from .suffix import Suffix
    from .token_recycling import TokenRecycling
