"""Drafters: one file a method."""

from .draft_model import DraftModel
from .plain import Plain
from .prompt_lookup import PromptLookup
from .self_quantized import SelfQuantized

__all__ = ["DraftModel", "Plain", "PromptLookup", "SelfQuantized"]
