"""The decoding loop, and the slow obvious decoder it is tested against."""

from .autoregressive import autoregressive
from .generation import generate
from .loop import SpeculativeDecoder

__all__ = ["SpeculativeDecoder", "autoregressive", "generate"]
