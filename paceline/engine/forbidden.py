"""Removes drafted tokens that a request's grammar forbids, before the target's pass computes rows for them.

regex a(b|c)     draft  a ── d       verified  a ── c
                        │    └── e
                        └─── c
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from ..core.draft import Draft
from ..core.request import Sequence
from ..core.tree import TokenTree


def without_forbidden(draft: Draft, seqs: Seq[Sequence]) -> Draft:
    """The draft without forbidden tokens and their descendants.

    A draft with a distribution q keeps them: its rejection rule is only correct if it sees every drawn token.
    """
    if draft.q is not None or all(seq.grammar is None for seq in seqs):
        return draft
    tree = draft.tree
    kept = [_allowed(tree, row, seq) for row, seq in enumerate(seqs)]
    if [len(nodes) for nodes in kept] == tree.sizes:
        return draft
    ids, parents, probes = zip(*(tree.part(row, nodes) for row, nodes in enumerate(kept)), strict=True)
    made = TokenTree.from_lists(ids, parents, tree.device, probes)
    confidence = draft.confidence
    if confidence is not None:
        confidence = torch.full_like(confidence[:, : made.num_nodes], torch.nan)
        for row, nodes in enumerate(kept):
            confidence[row, : len(nodes)] = draft.confidence[row, nodes]  # type: ignore[index]
    return replace(draft, tree=made, confidence=confidence)


def _allowed(tree: TokenTree, row: int, seq: Sequence) -> list[int]:
    """The nodes of a row to keep, in order."""
    ids, parents, probes, size = *(lists[row] for lists in tree.lists), tree.sizes[row]
    stays = dict[int, bool]()
    if seq.grammar is not None:
        for node in range(size - 1, 0, -1):  # from the leaves, since one call decides a whole path
            if node not in stays and not probes[node]:
                path = tree.path_to(row, node)
                count = seq.grammar.count_allowed(seq.output_ids, [ids[on_path] for on_path in path])
                stays |= {on_path: place < count for place, on_path in enumerate(path)}
    for node in range(1, size):  # a probe is kept if its parent is
        if node not in stays:
            stays[node] = parents[node] == 0 or stays[parents[node]]
    return [0, *(node for node in range(1, size) if stays[node])]
