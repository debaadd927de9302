"""Drafters: one file a method."""

from .choose import Choose
from .draft_model import DraftModel
from .plain import Plain
from .prompt_lookup import PromptLookup
from .self_quantized import SelfQuantized

__all__ = ["Choose", "DraftModel", "Plain", "PromptLookup", "SelfQuantized"]
