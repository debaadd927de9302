"""What a self-draft reads of a long text: its beginning, its end, and the surroundings of places that match the end.

    columns   0 .. 15 | ... p - 64 .. p + 63 ... | L - size .. L - 1 | drafted
    read      sink    | for each of eight places | window            | all

A place is where the last two tokens or more of some round stood before, as prompt lookup finds it: an answer that
copies or sums up goes on near there. The cache is the target's, and verification reads all of it (TriForce, arXiv
2404.11912; MagicDec, arXiv 2408.11049). Without the first columns attention has nowhere to rest (StreamingLLM, arXiv
2309.17453). Columns keep their positions. Layers with a window of their own read that.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, TypeAlias, final

from pydantic import Field

from ..attention.masks import Spans
from ..core.request import TokenSequence
from .lookup import PromptLookup

WINDOW = 512
"""The size where none is given."""
SINK, PLACES, AROUND, SHORTEST = 16, 8, 64, 2
"""Columns at the beginning; the newest places, columns before and after each, the fewest tokens that match there."""
WHOLE = 4
"""Up to so many windows a text is read whole: less would save little."""
WindowSize: TypeAlias = Annotated[int, Field(ge=0)]


@final
class DraftWindow:
    """The columns that drafts read of the texts of a batch. size: how many of the last ones; 0: all."""

    def __init__(self, size: int):
        self.size, self._most = size, max(SINK + size, WHOLE * size)
        self._lookup, self._places = PromptLookup(), dict[int, list[int]]()  # by slot, the newest first

    def follow(self, seqs: Iterable[TokenSequence]) -> None:
        """Note where each text that is longer than what is read of it goes on; a new token takes O(1)."""
        for seq in seqs:
            if self.size and len(seq.token_ids) > self._most:
                match = self._lookup.find(seq)
                if match is not None and match[1] >= SHORTEST:
                    apart = [one for one in self._places.get(seq.slot, ()) if abs(one - match[0]) > AROUND // 2]
                    self._places[seq.slot] = [match[0], *apart][:PLACES]

    def spans(self, slot: int, length: int) -> Spans:
        """Begins and ends of the columns to read of a slot with `length` columns."""
        if length <= self._most:
            return [(0, length)]
        spans, end = [(0, SINK)], length - self.size
        around = sorted((max(0, place - AROUND), min(end, place + AROUND)) for place in self._places.get(slot, ()))
        for first, last in [*((first, last) for first, last in around if first < last), (end, length)]:
            if first <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(last, spans[-1][1])
            else:
                spans.append((first, last))
        return spans

    def release(self, slots: Sequence[int]) -> None:
        """Forget the texts of these slots."""
        for slot in slots:
            self._places.pop(slot, None)
        self._lookup.release(slots)


def suffix_of(window: int | None, separator: str) -> str:
    """What a name says of a window that was given."""
    return "" if window is None else f"{separator}window={window}"
