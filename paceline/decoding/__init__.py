"""The decoding loop."""

from .generation import generate
from .loop import SpeculativeDecoder

__all__ = ["SpeculativeDecoder", "generate"]
