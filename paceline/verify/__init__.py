"""Verifiers: which drafted tokens are accepted. Pure functions of the draft, the target's distribution and the seed.

    verifier     level          what holds                                                      rules
    `Coupled`    exact          the tokens of plain decoding with the same seed (the default)   R0, R7
    `Ratio`      distribution   the distribution of plain decoding, other tokens                R1 to R5
    `Typical`    lossy          another distribution; needs `allow_lossy=True`                  R6

Start reading at `rejection`.
"""

from .coupled import Coupled
from .ratio import Ratio
from .typical import Typical

__all__ = ["Coupled", "Ratio", "Typical"]
