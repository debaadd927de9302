"""The prefix cache: what was computed for the beginning of one text, kept for later texts that begin alike.

vLLM calls this automatic prefix caching; see also SGLang's RadixAttention (Zheng et al. 2023, arXiv 2312.07104). A page
is found behind the very pages before it, and by all that its columns read, not by a hash of it. Texts are cut only
where that changes no bit, see `page_ends`.

    columns    0 ...... 15 | 16 ...... 31 | 32 ...... 47 | 48 .. 52
    page       A             B              C              not kept: no page ends here
    key        (root, what   (A, what       (B, what
                 0-15 read)    16-31 read)    32-47 read)

"""

import itertools
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, final

import torch
from torch import Tensor

from ..attention.kv_cache import SlotCache
from ..attention.states import StateStore
from ..core.vision import VisionPrompt
from ..hf.vision import BoundedCache

PAGE = 16
"""Columns of a page of native passes; vLLM's block size."""

PREFIX_BYTES = 1 << 30

_ROOT = 0
_Key: TypeAlias = tuple[int, Hashable]
"""The number of the page before, `_ROOT` for none, and all that the columns were computed from besides."""


@dataclass(frozen=True, eq=False)
class Page:
    """Keys and values of n columns, [H, n, d] for each layer, and their states [n, E], where these were watched.

    number: of this page, for the keys of those behind it. The page at the end of a text may lack its last column.
    """

    number: int
    layers: list[tuple[Tensor, Tensor]]
    states: dict[int, Tensor]

    def has(self, num_columns: int, layers: Iterable[int]) -> bool:
        """Whether it has so many columns, and the states of these layers."""
        return num_columns <= self.layers[0][0].shape[1] and self.states.keys() >= set(layers)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for pair in self.layers for t in pair) + sum(t.nbytes for t in self.states.values())


@final
class PrefixCache(BoundedCache[_Key, Page]):
    """Pages of a slot cache and its states, at most `max_bytes` in all, see `resize`; the least recently used go first.

    keeps_text: False keeps only what comes before the end of a prompt's last image. It may be changed at any time.

    The methods' `ends` are where the pages of a text end, the last at the text's end or before.
    """

    def __init__(self, cache: SlotCache, states: StateStore):
        super().__init__(PREFIX_BYTES, lambda page: page.num_bytes)  # a page is older than the one before it
        self._cache, self._states = cache, states
        self.keeps_text = False
        self._numbers = itertools.count(1)
        self._watched = dict[int, tuple[int, ...]]()  # the states that each slot has from its first column on

    def restore(self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None, ends: Iterable[int]) -> int:
        """Begin a slot with the pages of a text that are here, but for its last token; returns the columns.

        A page without the states that are watched now is as good as none.
        """
        keys, pages, length, last = list[_Key](), list[Page](), 0, len(token_ids) - 1
        watched = self._watched[slot] = self._states.wanted
        for begin, end in pairwise([0, *self._kept(vision, ends)]):
            key = pages[-1].number if pages else _ROOT, _read_by(token_ids, vision, begin, end)
            page, end = self._held.get(key), min(end, last)
            if page is None or not page.has(end - begin, watched):
                break
            keys.append(key)
            pages.append(page)
            length = end
        self._touch(keys)
        if length:
            self._cache.restore(slot, [page.layers for page in pages], length)
            given = {layer: torch.cat([page.states[layer] for page in pages])[None, :length] for layer in watched}
            if watched:
                self._states.write([slot], [0], given, length, self._cache.capacity)
        return length

    def keep(self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None, ends: Iterable[int]) -> None:
        """Hold the pages of a text that a slot has, as many as there is room for.

        The last token is left out: what is behind it may be of a draft.
        """
        last, held, number = len(token_ids) - 1, self._cache.lengths[slot], _ROOT
        keys, watched = dict[_Key, None](), self._watched.get(slot, ())
        for begin, end in pairwise([0, *self._kept(vision, ends)]):
            key, end = (number, _read_by(token_ids, vision, begin, end)), min(end, last)
            if end > held:
                break
            page = self._held.get(key)
            if page is None or not page.has(end - begin, watched):
                rows = {layer: self._states.read(slot, begin, end, (layer,)).clone() for layer in watched}
                number = next(self._numbers) if page is None else page.number
                self.drop(key)
                page = Page(number, self._cache.copy_of(slot, begin, end), rows)
                if not self._make_room(page.num_bytes, keys):
                    break
                self.put(key, page)
            keys[key] = None
            self._held.move_to_end(key)
            number = page.number
        self._touch(keys)

    def resize(self, max_bytes: int) -> None:
        """Hold at most so many bytes from now on, of any text; 0: nothing."""
        self.max_bytes, self.keeps_text = max_bytes, True
        self.shrink(self.num_bytes - max_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Drop pages until so many bytes fewer are held, or all of them."""
        most = max(0, self.num_bytes - num_bytes)
        while self._held and self.num_bytes > most:
            self.drop(next(iter(self._held)))

    def _kept(self, vision: VisionPrompt | None, ends: Iterable[int]) -> list[int]:
        """The ends of the pages that may be kept at all."""
        if self.max_bytes == 0:
            return []
        edge = 0 if vision is None else vision.edge
        return list(ends) if self.keeps_text else [end for end in ends if end <= edge]

    def _touch(self, keys: Iterable[_Key]) -> None:
        """Make these pages of a text the most recent; its first is the last to go."""
        for key in reversed([*keys]):
            self._held.move_to_end(key)

    def _make_room(self, num_bytes: int, needed: Container[_Key]) -> bool:
        """Drop pages for so many bytes; False where those that are needed leave no room."""
        while self.num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in needed:
                return False
            self.drop(oldest)
        return True


def page_ends(length: int, vision: VisionPrompt | None, page: int = PAGE) -> Iterator[int]:
    """Where pages of native passes end, in a text of so many tokens: anywhere but within a block.

    The bits of a native row do not depend on what shares its pass, so any cut will do. Images end a page, so that a
    later question about them needs none of their features.

    Example: page 4, 14 tokens, an image at 2 to 6, of which all columns see one another: 6, 8, 12.
    """
    blocks = () if vision is None else vision.blocks
    stops = () if vision is None else [image.stop for image in vision.images]
    for end in sorted({*range(page, length + 1, page), *stops, *(stop for _, stop in blocks)}):
        if end <= length and not any(first < end < last for first, last in blocks):
            yield end


def _read_by(token_ids: Sequence[int], vision: VisionPrompt | None, begin: int, end: int) -> Hashable:
    """All that the columns from `begin` to `end` are computed from, besides the columns before them.

    Positions are left out: tokens and images before a column decide its position.
    """
    ids = tuple(token_ids[begin:end])
    if vision is None:
        return ids
    images = [
        (image.key, sum(place < begin for place in image.places))
        for image in vision.images
        if image.start < end and begin < image.stop
    ]
    blocks = [(first - begin, last - begin) for first, last in vision.blocks if first < end and begin < last]
    # Before the edge embeddings enter a pass as rows, which round otherwise where a model scales its embeddings.
    num_rows = max(0, min(vision.edge, end) - begin)
    return ids, tuple(images), tuple(blocks), num_rows
