"""The prefix cache: keys and values of finished texts, reused for later texts with the same beginning.

vLLM calls this automatic prefix caching; see also SGLang's RadixAttention (Zheng et al. 2023, arXiv 2312.07104). The
key of a page is its predecessor and everything its columns were computed from, not a hash. Texts are cut into pages
only where that changes no bit, see `page_ends`.

    columns    0 ...... 15 | 16 ...... 31 | 32 ...... 47 | 48 .. 52
    page       A             B              C              not kept: the page is not full
    key        (root, ids    (A, ids        (B, ids
                 of 0-15)      of 16-31)      of 32-47)
"""

import itertools
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, final

import torch
from torch import Tensor

from ..attention.kv_cache import SlotCache
from ..attention.recurrent import PAGE
from ..attention.states import StateStore
from ..core.vision import VisionPrompt
from ..hf.vision import BoundedCache

PREFIX_BYTES = 1 << 30

_ROOT = 0
_Key: TypeAlias = tuple[Hashable, Hashable]
"""The number of the previous page, and everything else that the columns were computed from; of a first page `_ROOT`, or
the text's owner."""


@dataclass(frozen=True, eq=False)
class Page:
    """Keys and values of n columns, [H, n, d] for each layer, and the watched states [n, E].

    The last page of a text may lack its last column.
    number: identifies this page in the keys of its successors.
    recurrent: the states of recurrent layers after it, or None; a text can go on only from pages that have them.
    """

    number: int
    layers: list[tuple[Tensor, Tensor]]
    states: dict[int, Tensor]
    recurrent: list[Tensor] | None = None

    def has(self, num_columns: int, layers: Iterable[int]) -> bool:
        """Whether it has this many columns, and the states of these layers."""
        return num_columns <= self.layers[0][0].shape[1] and self.states.keys() >= set(layers)

    @property
    def num_bytes(self) -> int:
        columns = [tensor for pair in self.layers for tensor in pair]
        return sum(tensor.nbytes for tensor in (*columns, *self.states.values(), *(self.recurrent or ())))


@final
class PrefixCache(BoundedCache[_Key, Page]):
    """Pages of a slot cache and its states, at most `max_bytes` in all; the least recently used are dropped first.

    keeps_text: False keeps only pages before the end of a prompt's last image. It may be changed at any time.

    The argument `ends` of methods lists where the pages of a text end.
    """

    def __init__(self, cache: SlotCache, states: StateStore):
        super().__init__(PREFIX_BYTES, lambda page: page.num_bytes)  # `_touch` makes a page older than its predecessor
        self._cache, self._states = cache, states
        self.keeps_text = False
        self._numbers = itertools.count(1)
        self._watched = dict[int, tuple[int, ...]]()  # the states that each slot has from its first column on
        self._roots = dict[int, Hashable]()  # the number before the first page of each slot

    def restore(
        self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None, ends: Iterable[int],
        watched: tuple[int, ...] = (), owner: Hashable = "",
    ) -> int:  # fmt: skip
        """Copy the cached pages of a text, without its last token, to an empty slot; returns the number of columns.

        watched: the layers whose states the slot will have. A page that lacks them counts as missing.
        owner: the tenant whose text it is, now and in `keep`, and the fingerprint of its adapter if it has one; the
            pages of others count as missing, too.
        """
        keys, pages, ends_of_pages, last = list[_Key](), list[Page](), list[int](), len(token_ids) - 1
        ends = [*ends]
        self._watched[slot], self._roots[slot] = watched, owner or _ROOT
        for begin, end in pairwise([0, *self._kept(vision, ends)]):
            key = pages[-1].number if pages else self._roots[slot], _read_by(token_ids, vision, begin, end)
            page, end = self._held.get(key), min(end, last)
            if page is None or not page.has(end - begin, watched):
                break
            keys.append(key)
            pages.append(page)
            ends_of_pages.append(end)
        if (recurrent := self._cache.recurrent) is not None:
            for most in (last, 0 if vision is None else min(vision.edge, last)):  # and a question about the same images
                recurrent.stop_at(slot, max((end for end in self._kept(vision, ends) if end <= most), default=0))
            num_whole = sum(end in ends for end in ends_of_pages)  # all but a last one that lacks a column
            known = max((n for n, page in enumerate(pages[:num_whole], 1) if page.recurrent is not None), default=0)
            if known < num_whole:  # another text went on differently from here: the next one may too
                recurrent.stop_at(slot, ends_of_pages[num_whole - 1], is_fork=True)
            keys, pages = keys[:known], pages[:known]
        length = ends_of_pages[len(pages) - 1] if pages else 0
        self._touch(keys)
        if length:
            state = pages[-1].recurrent or ()
            self._cache.restore(slot, [page.layers for page in pages], length, state)
            states = {layer: torch.cat([page.states[layer] for page in pages])[None, :length] for layer in watched}
            if watched:
                self._states.write([slot], [0], states, length, self._cache.capacity)
        return length

    def keep(self, slot: int, token_ids: Sequence[int], vision: VisionPrompt | None, ends: Iterable[int]) -> None:
        """Cache the pages of a text from a slot, as many as fit.

        The last token is left out, since its column may belong to a draft.
        """
        last, held, number = len(token_ids) - 1, self._cache.lengths[slot], self._roots.get(slot, _ROOT)
        keys, watched = dict[_Key, None](), self._watched.get(slot, ())
        copies = {} if self._cache.recurrent is None else self._cache.recurrent.copies[slot]
        for begin, end in pairwise([0, *self._kept(vision, ends)]):
            key, copy, end = (number, _read_by(token_ids, vision, begin, end)), copies.get(end), min(end, last)
            if end > held:
                break
            page = self._held.get(key)
            kept = None if page is None else page.recurrent
            if page is None or not page.has(end - begin, watched) or (kept is None and copy is not None):
                rows = {layer: self._states.read(slot, begin, end, (layer,)).clone() for layer in watched}
                number = next(self._numbers) if page is None else page.number
                self.drop(key)
                page = Page(number, self._cache.copy_of(slot, begin, end), rows, kept or copy)
                if not self._make_room(page.num_bytes, keys):
                    break
                self.put(key, page)
            keys[key] = None
            self._held.move_to_end(key)
            number = page.number
        self._touch(keys)

    def resize(self, max_bytes: int) -> None:
        """Hold at most this many bytes from now on, of any text; 0 turns the cache off."""
        self.max_bytes, self.keeps_text = max_bytes, True
        if self._cache.recurrent is not None:
            self._cache.recurrent.stops_at_pages = max_bytes > 0
        self.shrink(self.num_bytes - max_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Drop pages until this many bytes are free, or none is left."""
        most = max(0, self.num_bytes - num_bytes)
        while self._held and self.num_bytes > most:
            self.drop(next(iter(self._held)))

    def _kept(self, vision: VisionPrompt | None, ends: Iterable[int]) -> list[int]:
        """The ends of the pages that may be kept."""
        if self.max_bytes == 0:
            return []
        edge = 0 if vision is None else vision.edge
        return list(ends) if self.keeps_text else [end for end in ends if end <= edge]

    def _touch(self, keys: Iterable[_Key]) -> None:
        """Make these pages of a text the most recently used, its first page most of all."""
        for key in reversed([*keys]):
            self._held.move_to_end(key)

    def _make_room(self, num_bytes: int, needed: Container[_Key]) -> bool:
        """Drop pages to make this many bytes fit; returns False if that would drop needed ones."""
        while self.num_bytes + num_bytes > self.max_bytes:
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in needed:
                return False
            self.drop(oldest)
        return True


def page_ends(length: int, vision: VisionPrompt | None, page: int = PAGE) -> Iterator[int]:
    """Where the pages of native passes end in a text of `length` tokens: anywhere but within a block.

    The bits of a native row do not depend on other rows, so any cut is allowed. A page also ends after each image, so
    that a later question about the image does not need its features.

    Example: page 4, 14 tokens, an image at 2 to 6 whose columns form a block: 6, 8, 12.
    """
    blocks = () if vision is None else vision.blocks
    stops = () if vision is None else [vision.edge, *(image.stop for image in vision.images)]
    for end in sorted({*range(page, length + 1, page), *stops, *(stop for _, stop in blocks)}):
        if 0 < end <= length and not any(first < end < last for first, last in blocks):
            yield end


def _read_by(token_ids: Sequence[int], vision: VisionPrompt | None, begin: int, end: int) -> Hashable:
    """Everything that the columns from `begin` to `end` are computed from, besides the columns before them.

    Positions on several axes may depend on an image behind them; others follow from the tokens and images before.
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
    # Before the edge, embeddings enter a pass as rows, which are rounded differently if a model scales its embeddings.
    num_rows = max(0, min(vision.edge, end) - begin)
    axes = vision.position_ids
    positions = None if axes is None else str(axes[:, begin : min(end, vision.edge)].tolist())
    return ids, tuple(images), tuple(blocks), num_rows, positions
