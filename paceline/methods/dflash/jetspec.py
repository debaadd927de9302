"""JetSpec heads are causal DFlash heads, whose masks may follow drafted tokens (Hu et al. 2026, arXiv 2606.18394).

    pass 1     x_n  mask  mask  mask             what may be at each place, whatever is before it
    its tree   x_n  a  aa  b  ba                 of the likeliest nodes
    pass 2     x_n  a  aa  b  ba | mask  ..      a mask behind each of these nodes says what follows its path
    the tree   of the likeliest nodes by both: of nodes that were not read, the children are those of their level

So the levels of a tree know their branch after two passes, however many they are.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import nn

from ...core.interfaces import DraftBudget
from ...core.nodes import path_to
from ...core.request import TokenSequence
from ...schema import checked, checked_call
from ...system.hardware import median_seconds
from ..eagle.drafter import Eagle, EagleSpec, Shape
from ..heads.draft_layer import Level
from ..heads.top_tokens import Best
from ..heads.trees import Children, DynamicTree, grow
from .drafter import DFlashPass
from .head import DFlashHead

Passes = Annotated[int, Field(ge=1, le=64)]
Reads = Annotated[int, Field(ge=1, le=256)]
_Path = tuple[int, ...]
_Ranked = tuple[Sequence[int], Sequence[float]]
"""The best children of a node, and the logarithms of the confidence in them."""


@final
class JetSpec(Eagle):
    """Draft trees with a JetSpec head. Options are those of `Eagle`; trees are no deeper than its block.

    passes: the most over the head; with one, no level knows its branch, as in DFlash. reads: the most drafted tokens
        that a later pass reads.
    """

    name: ClassVar[str] = "jetspec"
    layer: DFlashPass  # type: ignore[assignment]
    _head, _pass = DFlashHead, DFlashPass

    @checked_call
    def __init__(
        self, head: str | PathLike[str] | nn.Module, tree: Shape = "dynamic",
        top_k: Annotated[int, Field(ge=1)] = 8, ngrams: bool = True, passes: Passes = 2, reads: Reads = 8,
    ):  # fmt: skip
        super().__init__(head, tree, top_k, ngrams)
        self._passes, self._reads = passes, reads

    @torch.inference_mode()
    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """All passes of a draft, and a token of a prefill."""
        ((first, reading),) = super().seconds().values()
        ids, ups = torch.zeros(1, 1 + self._reads, dtype=torch.long), torch.zeros(1, 1 + self._reads, dtype=torch.long)
        ups[0, 0] = -1
        later = median_seconds(lambda: self._children(self.layer.behind([0], ids, ups, self.top_k), [], 0))
        return {self.source: (first + (self._passes - 1) * later, reading)}

    @torch.inference_mode()
    def _grow_at_once(self, seqs: Sequence[TokenSequence], growing: Sequence[DynamicTree]) -> None:
        levels, is_greedy = max(tree.levels for tree in growing), all(seq.params.temperature == 0 for seq in seqs)
        most = self._in_pass(seqs, 0)[0] if is_greedy else 0  # otherwise every level has a noise of its own
        first = self._catch_up(seqs, most, masks=levels - 1)
        by_level = self._best(first, seqs, [[*range(levels)]] * len(seqs))
        known: list[dict[_Path, _Ranked]] = [{} for _ in seqs]  # by the path to a node

        def children(trees: Sequence[DynamicTree], rows: Sequence[int], level: int) -> Children:
            """Of the nodes of each frontier."""
            tokens, logps = list[list[Sequence[int]]](), list[list[Sequence[float]]]()
            for row in rows:
                paths = (_path(trees[row], node) for node in trees[row].frontier)
                ranked = [known[row].get(path, by_level[row][level]) for path in paths]
                tokens.append([ids for ids, _ in ranked])
                logps.append([row_logps for _, row_logps in ranked])
            return tokens, logps

        for _ in range(self._passes - 1):
            trees = [
                self._tree(DraftBudget(tree.depth, self._reads), seq) for tree, seq in zip(growing, seqs, strict=True)
            ]
            grow(trees, lambda rows, level, trees=trees: children(trees, rows, level))
            if not self._read(seqs, trees, known, most):
                break
        grow(growing, lambda rows, level: children(growing, rows, level))

    def _read(
        self,
        seqs: Sequence[TokenSequence],
        trees: Sequence[DynamicTree],
        known: Sequence[dict[_Path, _Ranked]],
        most: int,
    ) -> bool:
        """Learn the children of the nodes of these trees, unless all of them are known; whether there was a pass."""
        paths = [[path for node in tree.kept() if len(path := _path(tree, node)) < tree.levels] for tree in trees]
        if all(path in one for row, one in zip(paths, known, strict=True) for path in row):
            return False
        width, ids, ups, offsets = max(map(len, paths)), list[list[int]](), list[list[int]](), list[list[int]]()
        for seq, row in zip(seqs, paths, strict=True):
            place, pad = {path: n for n, path in enumerate([(), *row])}, [0] * (width - len(row))
            ids.append([seq.token_ids[-1], *(path[-1] for path in row), *pad])
            ups.append([-1, *(place[path[:-1]] for path in row), *pad])
            offsets.append([*map(len, row), *pad])
        level = self.layer.behind([seq.slot for seq in seqs], torch.tensor(ids), torch.tensor(ups), most)
        for row, one, best in zip(paths, known, self._best(level, seqs, offsets), strict=True):
            one.update(zip(row, best, strict=False))
        return True

    def _best(
        self, level: Level, seqs: Sequence[TokenSequence], offsets: Sequence[Sequence[int]]
    ) -> list[list[_Ranked]]:
        """The best tokens of the rows of a level, which lie at these offsets behind the texts [B, N]."""
        found: list[list[_Ranked]] = [[([], [])] * len(row) for row in offsets]
        members: dict[int, list[tuple[int, int]]] = {}  # rows of one offset, or all of them if there is no noise
        for row, of_row in enumerate(offsets):
            for place, offset in enumerate(of_row):
                members.setdefault(0 if level.best else offset, []).append((row, place))
        for offset, where in members.items():
            rows, columns = torch.tensor(where, device=level.logits.device).T
            best = None if level.best is None else Best(*(part[rows, columns] for part in level.best))
            of_rows = [seqs[row] for row, _ in where]
            tokens, logps = self._ranking.top(level.logits[rows, columns], of_rows, offset, self.top_k, best)
            for (row, place), row_tokens, row_logps in zip(where, tokens, logps, strict=True):
                found[row][place] = row_tokens, row_logps
        return found


def _path(tree: DynamicTree, node: int) -> _Path:
    return tuple(tree.tokens[on_path] for on_path in path_to(tree.parents, node))


@checked
class JetSpecSpec(EagleSpec):
    """Options of `JetSpec`."""

    passes: Passes = 2
    reads: Reads = 8
    method = "jetspec"
    drafter = JetSpec
    tokens = 8
