"""Attention masks of a pass, the cache columns of its nodes, and how attention is split into kernel calls."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..core.tree import TokenTree
from .kv_cache import BLOCK, round_up


@dataclass(frozen=True)
class Chunk:
    """A window that begins anew: a node sees the positions of its own chunk of `size`, counted from 0 (Llama 4)."""

    size: int


Window: TypeAlias = int | Chunk | None
"""How many of the last positions a node sees, or its chunk; None: all."""


Spans: TypeAlias = Sequence[tuple[int, int]]
"""Begins and ends of columns, in their order."""


def within(window: int | Chunk, positions: Tensor, places: Tensor) -> Tensor:
    """Whether nodes at `positions` see `places` before them, which are broadcast."""
    if isinstance(window, Chunk):
        return positions // window.size == places // window.size
    return positions - places < window


def visible(
    starts: Tensor, ancestor_mask: Tensor, columns: int, window: Window = None, positions: Tensor | None = None
) -> Tensor:
    """The attention mask of the nodes of a pass: True for the committed columns and for a node's own ancestors.

    Returns [B, M, columns] for the rows of `ancestor_mask`, without reading anything back from the device.
    starts: the number of committed columns of each row, [B]; node i is in column start + i.
    ancestor_mask: [B, M, N], M = N or fewer, see `TokenTree.ancestor_mask`.
    window: needs `positions` [B, N], and M = N.
    """
    rows, nodes = ancestor_mask.shape[1:]
    column = torch.arange(columns, device=starts.device)
    behind = column - starts[:, None]  # [B, S]: the node in each column, if it is one of 0 .. N - 1
    node, is_node = behind.clamp(0, nodes - 1), (behind >= 0) & (behind < nodes)
    seen = (behind < 0)[:, None] | (is_node[:, None] & ancestor_mask.gather(2, node[:, None].expand(-1, rows, -1)))
    if window is None:
        return seen
    assert positions is not None
    places = torch.where(is_node, positions.gather(1, node), column)
    return seen & within(window, positions[:, :, None], places[:, None])


def additive(mask: Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> Tensor:
    """The mask as a term that is added to scores: 0 where it is True, `hidden` elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden)


def layer_masks(
    seen: Tensor, back: Tensor, windows: Mapping[str, int | None], dtype: torch.dtype, always: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, S] in the form of transformers: one, or one for each kind of layer.

    seen: which columns each node sees, [B, N, S].
    back: the distance in positions from each node to each column, [B, N, S].
    always: the columns that are seen even outside the window, [B, N, S].
    windows: the window of each kind of layer; the kind is "" where there is only one.
    """
    masks = dict[str, Tensor]()
    for kind, window in windows.items():
        near = seen if window is None else seen & (back < window)
        masks[kind] = additive(near if always is None else near | always, dtype, torch.finfo(dtype).min)[:, None]
    return masks.get("", masks)


@dataclass(frozen=True)
class Segment:
    """One call of the attention kernel: some nodes of some rows, and the columns they read.

    mask: [r, 1, M, S], 0 or -inf, M = nodes x groups, padded to `_padded_rows`.
    """

    rows: slice
    slots: slice
    nodes: slice
    mask: Tensor


@dataclass(frozen=True, eq=False)
class PromptRows:
    """The input rows of a pass over a prompt with images, in place of token embeddings.

    embeds: the rows [1, N, E].
    position_ids: [A, 1, N] for models whose positions have several axes.
    is_image: which rows hold image features, [1, N].
    deepstack: the features [M, E] that are added to these rows after each of the first layers (DeepStack).
    blocks: the column ranges that attend to one another in both directions.
    blocks_cross_window, windowed_blocks: whether they do so beyond a sliding window, and only in layers with one.
    extras: further arguments of a text model of transformers.
    """

    embeds: Tensor
    position_ids: Tensor | None = None
    is_image: Tensor | None = None
    deepstack: tuple[Tensor, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    blocks_cross_window: bool = False
    windowed_blocks: bool = False
    extras: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass
class PassLayout:
    """The columns of the nodes of one pass: row b has `starts[b]` committed columns, then its N nodes.

    tree: None for a prefill chunk, which is a causal chain of `num_nodes` nodes.
    offsets: what is added to the columns of each row to get positions.
    adapters: the LoRA adapter of each row, or None; empty: none has one. corrections: see `target.corrections`.
    rows: the input rows of a chunk of a prompt with images.
    """

    starts: list[int]
    num_nodes: int
    tree: TokenTree | None
    batch_invariant: bool = False
    row_multiple: int = 1
    max_length: int = 1 << 30
    slots: list[int] = field(default_factory=list)  # the cache slot of each row; empty: slot b for row b
    num_given: int | None = None  # the number of nodes without padding; None: there is no padding
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    head_rows: int | None = None  # how many last rows get logits; None: all; 0: none, as in a prefill
    is_mask: Tensor | None = None  # [B, N], which nodes are mask tokens; None: none. They follow the candidates.
    offsets: list[int] = field(default_factory=list)  # empty: zeros
    adapters: Sequence[Any] = ()
    corrections: Any = None  # of this pass, once it runs
    rows: PromptRows | None = None
    spans: Sequence[Spans] = ()  # the committed columns that each row sees in layers without a window; empty: all
    num_calls: int = 0  # layers that went through `tree_attention`
    _masks: dict[Window, list[Tensor]] = field(default_factory=dict)
    _segments: dict[tuple[Window, int], list["Segment"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = self.slots or list(range(len(self.starts)))
        self.offsets = self.offsets or [0] * len(self.starts)

    @cached_property
    def columns(self) -> Tensor:
        """Committed length + depth: the column of plain decoding. [B, N].

        Only probes can exceed the context; they get its last column.
        """
        depth = torch.arange(self.num_nodes, device=self.device) if self.tree is None else self.tree.depth
        return (torch.tensor(self.starts, device=self.device)[:, None] + depth).clamp_(max=self.max_length - 1)

    @cached_property
    def position_ids(self) -> Tensor:
        """Column + offset, [B, N], the same on every axis; for a prompt with images its own positions, [A, B, N]."""
        if self.rows is not None and self.rows.position_ids is not None:
            return self.rows.position_ids
        if not any(self.offsets):
            return self.columns
        return self.columns + torch.tensor(self.offsets, device=self.device)[:, None]

    def visible(self, window: Window) -> list[Tensor]:
        """The attention mask [N, S_b] of each row, built once for each window."""
        if window not in self._masks:
            self._masks[window] = [self._visible(row, window) for row in range(len(self.starts))]
        return self._masks[window]

    def _visible(self, row: int, window: Window) -> Tensor:
        start, n = self.starts[row], self.num_nodes
        if self.tree is None:
            ancestor_mask = torch.ones(1, n, n, dtype=torch.bool, device=self.device).tril()
        else:
            ancestor_mask = self.tree.ancestor_mask[row : row + 1]
        begins = torch.tensor([start], device=self.device)
        mask = visible(begins, ancestor_mask, round_up(start + n), window, self.columns[row : row + 1])[0]
        if self.spans and window is None:
            column = torch.arange(start, device=self.device)
            inside = [(first <= column) & (column < last) for first, last in self.spans[row]]
            mask[:, :start] &= torch.stack(inside).any(0)
        blocks = () if self.rows is None or (window is None and self.rows.windowed_blocks) else self.rows.blocks
        for first, last in blocks:  # a chunk never cuts a block
            nodes = slice(max(first - start, 0), max(last - start, 0))
            if nodes.start >= n:
                continue
            near = torch.ones(n, last - first, dtype=torch.bool, device=self.device)
            if window is not None and not self.rows.blocks_cross_window:  # type: ignore[union-attr]
                near = within(window, self.columns[row][:, None], torch.arange(first, last, device=self.device))
            mask[nodes, first:last] |= near[nodes]
        return mask

    def mask_4d(self, dtype: torch.dtype) -> Tensor:
        """The additive mask [B, 1, N, S] for models that do not call our attention function."""
        rows = self.visible(None)
        width = max(mask.shape[1] for mask in rows)
        full = torch.stack([nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in rows])
        return additive(full, dtype, torch.finfo(dtype).min)[:, None]

    def segments(self, window: Window, groups: int, dtype: torch.dtype) -> list[Segment]:
        """The kernel calls of the pass, built once for all layers with this window and group size.

        The sums of the kernel depend on the number of columns it is given. A batch-invariant node therefore reads
        exactly the blocks up to its own column, as in plain decoding, and a chain that crosses a block is cut there:

            columns   ..... 126 127 | 128 129          nodes 0, 1 read 128 columns, nodes 2, 3 read 192

        Otherwise rows of neighbouring slots share a call with as many columns as the longest of them needs.
        """
        if (window, groups) not in self._segments:
            self._segments[window, groups] = list(self._cut(window, groups, dtype))
        return self._segments[window, groups]

    def _cut(self, window: Window, groups: int, dtype: torch.dtype) -> Iterator[Segment]:
        slots, row = self.slots, 0
        masks = [additive(mask, dtype) for mask in self.visible(window)]
        while row < len(slots):
            edges, end = self._edges(row), row + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1 and self._can_share_call(row, end):
                end += 1
            for first, last in itertools.pairwise(edges):
                width = max(self._width(other, last) for other in range(row, end))
                mask = torch.stack(
                    [nn.functional.pad(m, (0, width), value=-torch.inf)[first:last, :width] for m in masks[row:end]]
                )
                mask = mask.repeat_interleave(groups, 1)
                mask = nn.functional.pad(mask, (0, 0, 0, _padded_rows(mask.shape[1]) - mask.shape[1]))
                yield Segment(slice(row, end), slice(slots[row], slots[end - 1] + 1), slice(first, last), mask[:, None])
            row = end

    def _edges(self, row: int) -> list[int]:
        """Where the nodes of a row are cut: before each node that begins a block."""
        number = self.num_given or self.num_nodes
        cuts = [i for i in range(1, number) if (self.starts[row] + i) % BLOCK == 0] if self.batch_invariant else []
        return [0, *cuts, self.num_nodes]

    def _width(self, row: int, last: int) -> int:
        """How many columns the nodes before `last` read. Padding may lack its own column."""
        number = self.num_given or self.num_nodes
        return round_up(self.starts[row] + (min(last, number) if self.batch_invariant else last))

    def _can_share_call(self, row: int, other: int) -> bool:
        """Whether two rows may share a call. Batch-invariant rows need equal widths, others similar ones."""
        here, there = self._width(row, self.num_nodes), self._width(other, self.num_nodes)
        if self.batch_invariant:
            return here == there and len(self._edges(row)) == len(self._edges(other)) == 2
        return 2 * min(here, there) > max(here, there)

    @cached_property
    def chains(self) -> list[list["Chain"]]:
        """The root-to-leaf chains of each row."""
        assert self.tree is not None
        return [[self._chain(row, path) for path in tree.paths] for row, tree in enumerate(self.tree.rows)]

    def _chain(self, row: int, path: list[int]) -> "Chain":
        start, spans = self.starts[row], self.spans[row : row + 1]
        nodes = path + [path[-1]] * (round_up(len(path), self.row_multiple) - len(path))
        columns = torch.arange(round_up(start + len(nodes)), device=self.device)
        columns[start : start + len(path)] = torch.tensor(path, device=self.device) + start
        tree = TokenTree.chain([[0] * len(nodes)], self.device)
        layout = PassLayout([start], len(nodes), tree, True, num_given=len(path), device=self.device, spans=spans)
        return Chain(path, nodes, columns, layout)


@dataclass(frozen=True)
class Chain:
    """One root-to-leaf path of a tree as a separate pass: its nodes (the last repeated as padding) and columns."""

    path: list[int]
    nodes: list[int]
    columns: Tensor
    layout: PassLayout


def _padded_rows(rows: int) -> int:
    """The rows that the kernel is given. It computes 32 at a time; a remainder of 1 to 3 would get other bits."""
    return rows if rows % 32 not in (1, 2, 3) else rows - rows % 32 + 4
