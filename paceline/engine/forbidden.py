"""Removes drafted tokens that a request's grammar forbids, before the target's pass computes rows for them.

regex a(b|c)     draft  a ── d       verified  a ── c
                        │    └── e
                        └─── c
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core.draft import Draft
from ..core.nodes import Tree
from ..core.request import TokenSequence
from ..core.tree import TokenTree


def without_forbidden(draft: Draft, seqs: Sequence[TokenSequence]) -> Draft:
    """The draft without forbidden tokens and their descendants.

    A draft with a distribution q keeps them: its rejection rule is only correct if it sees every drawn token.
    """
    if draft.q is not None or all(seq.grammar is None for seq in seqs):
        return draft
    rows = draft.tree.rows
    kept = [_allowed(tree, seq) for tree, seq in zip(rows, seqs, strict=True)]
    if all(len(nodes) == len(tree) for nodes, tree in zip(kept, rows, strict=True)):
        return draft
    pruned = TokenTree.of(map(Tree.part, rows, kept), draft.tree.device)
    confidence = draft.confidence
    if confidence is not None:
        confidence = torch.full_like(confidence[:, : pruned.num_nodes], torch.nan)
        for row, nodes in enumerate(kept):
            confidence[row, : len(nodes)] = draft.confidence[row, nodes]  # type: ignore[index]
    return replace(draft, tree=pruned, confidence=confidence)


def _allowed(tree: Tree, seq: TokenSequence) -> list[int]:
    """The nodes to keep, in order."""
    stays = {0: True}
    if seq.grammar is not None:
        for node in reversed(tree.candidates):  # from the leaves, since one call decides a whole path
            if node not in stays:
                count = seq.grammar.count_allowed(seq.output_ids, tree.tokens_to(node))
                stays |= {on_path: place < count for place, on_path in enumerate(tree.path_to(node))}
    for node, parent in enumerate(tree.parents):  # a probe is kept if its parent is
        stays.setdefault(node, stays.get(parent, True))
    return [node for node in range(len(tree)) if stays[node]]
