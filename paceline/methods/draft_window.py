"""What a self-draft reads of a long text: its beginning, its end, and what is around a match of its last tokens.

    columns   0 .. 15 | ... match - 64 .. match + 63 ... | L - size .. L - 1 | drafted
    read      sink    | the newest match before the window | window          | all

The cache is the target's, and verification reads all of it (TriForce, arXiv 2404.11912; MagicDec, arXiv 2408.11049).
Without the first columns attention has nowhere to rest (StreamingLLM, arXiv 2309.17453). Columns keep their positions.
Layers with a window of their own read that.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, TypeAlias, final

from pydantic import Field

from ..attention.masks import Spans
from ..core.request import TokenSequence
from .lookup import PromptLookup

WINDOW = 512
"""The size where none is given."""
SINK, AROUND, SHORTEST = 16, 64, 3
"""Columns at the beginning, and before and after a match of at least so many tokens."""
WindowSize: TypeAlias = Annotated[int, Field(ge=0)]


@final
class DraftWindow:
    """The columns that drafts read of the texts of a batch. size: how many of the last ones; 0: all."""

    def __init__(self, size: int):
        self.size, self._lookup, self._matches = size, PromptLookup(), dict[int, int]()

    def follow(self, seqs: Iterable[TokenSequence]) -> None:
        """Find the newest match in each text that is longer than what is read of it; a new token takes O(1)."""
        for seq in seqs:
            if self.size and len(seq.token_ids) > SINK + self.size:
                match = self._lookup.find(seq)
                self._matches[seq.slot] = match[0] if match is not None and match[1] >= SHORTEST else -1

    def spans(self, slot: int, length: int) -> Spans:
        """Begins and ends of the columns to read of a slot with `length` columns."""
        end = length - self.size
        if end <= SINK:
            return [(0, length)]
        match = self._matches.get(slot, -1)
        around = max(SINK, match - AROUND), min(end, match + AROUND)
        return [(0, SINK), *([around] if match >= 0 and around[0] < around[1] else []), (end, length)]

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._matches.pop(slot, None)
        self._lookup.release(slots)


def suffix_of(window: int | None, separator: str) -> str:
    """What a name says of a window that was given."""
    return "" if window is None else f"{separator}window={window}"
