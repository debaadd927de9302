"""Policies: how many tokens to draft this round, and by whom.

Fixed       the same number every round
Dynamic     by recent acceptance and the drafter's confidence
CostModel   by measured costs and learnt acceptance, never slower than plain decoding; start reading at `plan`
"""

from .cost_model import CostModel
from .profile import Profile
from .simple import Dynamic, Fixed

__all__ = ["CostModel", "Dynamic", "Fixed", "Profile"]
