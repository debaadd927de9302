"""Drafters: one file a method."""

from .choose import Choose
from .draft_model import DraftModel
from .eagle import Eagle
from .heads import Blockwise, Medusa
from .mtp import Mtp
from .plain import Plain
from .prompt_lookup import PromptLookup
from .self_quantized import SelfQuantized
from .space import Space

__all__ = [
    "Blockwise",
    "Choose",
    "DraftModel",
    "Eagle",
    "Medusa",
    "Mtp",
    "Plain",
    "PromptLookup",
    "SelfQuantized",
    "Space",
]
