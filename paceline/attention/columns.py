"""The columns of a limited cache that its sequences share."""

from collections.abc import Collection

BLOCK = 64
"""Columns are read in whole blocks, so that the bits of a row do not depend on the number of columns after it."""


def round_up(length: int, multiple: int = BLOCK) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


class Reserved:
    """The columns that each slot may fill, in whole blocks; all together at most `most` (None: any number).

    Rejected drafts may lie behind them for a round.
    """

    def __init__(self, most: int | None = None):
        self.most, self._columns = most, dict[int, int]()

    def fits(self, columns: int, without: Collection[int] = ()) -> bool:
        """Whether a slot may have so many beside the others. without: slots that do not count, such as this one."""
        others = sum(held for slot, held in self._columns.items() if slot not in without)
        return self.most is None or others + round_up(columns) <= self.most

    def take(self, slot: int, columns: int) -> bool:
        """Let a slot have at least so many; False where that is too many."""
        if round_up(columns) > self.of(slot):
            if not self.fits(columns, [slot]):
                return False
            self._columns[slot] = round_up(columns)
        return True

    def of(self, slot: int) -> int:
        """What a slot has."""
        return self._columns.get(slot, 0)

    def release(self, slot: int) -> None:
        """Give back what a slot has; harmless if it has nothing."""
        self._columns.pop(slot, None)
