"""What a request wants of the passes that read its text, besides keys and values: some of their rows.

    text     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9      read in chunks
    rows           t2 t3   t4 t5 t6 t7   t8         first = 2, stop = 9

Columns before `first` may come from the prefix cache, and tokens from `stop` on are not read.
"""

from abc import ABC, abstractmethod

from torch import Tensor


class Reading(ABC):
    """Takes the rows `first` to `stop` of a text, in their order, whatever chunks it is read in.

    wants_logits: whether a row is the logits [V] after a token, or the token's hidden state [E] after the final norm.
    ends: whether the request ends with it: nothing is decoded.
    """

    wants_logits, ends = False, True

    def __init__(self, first: int, stop: int):
        self.first, self.stop = first, stop

    @abstractmethod
    def restart(self) -> None:
        """The text is read from its beginning, perhaps once more."""

    @abstractmethod
    def take(self, rows: Tensor) -> None:
        """Take the next rows, [M, V] or [M, E]."""
