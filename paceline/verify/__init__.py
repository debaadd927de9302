"""Verifiers: which drafted tokens are accepted. Pure functions of the draft, the target's distribution and the seed.

    verifier     level          what holds                                                      rules
    `Coupled`    exact          the tokens of plain decoding with the same seed (the default)   R0, R7
    `Ratio`      distribution   the distribution of plain decoding, other tokens                R1 to R5
    `Typical`    lossy          another distribution; needs `allow_lossy=True`                  R6

Start reading at `rejection`.
"""

from ..core.interfaces import Verifier
from ..errors import LossyNotAllowed
from .coupled import Coupled
from .ratio import Ratio
from .typical import Typical

__all__ = ["Coupled", "Ratio", "Typical", "check_lossy"]


def check_lossy(verifier: Verifier | None, allow_lossy: bool) -> None:
    """Raise `LossyNotAllowed` for a verifier that changes answers, unless that is allowed."""
    if verifier is not None and not (verifier.lossless or allow_lossy):
        message = f"{verifier.name} changes what the model answers"
        raise LossyNotAllowed(message, fix="pass allow_lossy=True to accept that")
