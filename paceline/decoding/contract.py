"""What every drafter owes the loop, checked each round: a bad draft is an error that names the drafter."""

from collections.abc import Collection
from collections.abc import Sequence as Seq

from ..core.draft import Draft, Law
from ..core.interfaces import DraftBudget
from ..core.request import Sequence
from ..errors import DraftError


def check_draft(
    draft: Draft,
    seqs: Seq[Sequence],
    budgets: Seq[DraftBudget],
    vocab_size: int,
    num_masks: int = 0,
    undraftable: Collection[int] = (),
) -> None:
    """Raise `DraftError` unless the draft is a tree per sequence, in the vocabulary, in budget, with its law.

    num_masks: mask tokens that the target takes; mask j is a probe with token `vocab_size + j`, see `_check_mask`.
    undraftable: tokens that stand for pictures.
    """
    tree = draft.tree
    if tree.token_ids.shape[0] != len(seqs):
        raise DraftError(
            f"{draft.source} drafted the wrong number of rows", got=tree.token_ids.shape[0], expected=len(seqs)
        )
    if not draft.has_law:
        need = "no q" if draft.law is Law.POINT_MASS else "a q"
        raise DraftError(f"{draft.source} handed over a {draft.law.value} draft", expected=need)
    if draft.q is not None and draft.q.shape != (*tree.token_ids.shape, vocab_size):
        expected = (*tree.token_ids.shape, vocab_size)
        raise DraftError(f"{draft.source}: q has the wrong shape", got=tuple(draft.q.shape), expected=expected)
    ids, parents, probes = tree.token_ids.tolist(), tree.parents.tolist(), tree.is_probe.tolist()
    for row, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
        if ids[row][0] != seq.token_ids[-1] or parents[row][0] != -1 or probes[row][0]:
            raise DraftError(
                f"{draft.source}: node 0 is not the last token", got=ids[row][0], expected=seq.token_ids[-1]
            )
        candidates = probes[row].count(False) - 1
        if candidates > budget.nodes:
            raise DraftError(f"{draft.source} drafted too many tokens", got=candidates, expected=f"<= {budget.nodes}")
        depth, last = [0] * tree.num_nodes, tree.num_nodes - 1 - probes[row][::-1].index(False)
        for node in range(1, tree.num_nodes):
            up = parents[row][node]
            if not 0 <= up < node:
                raise DraftError(f"{draft.source}: a parent must precede its child", got=f"node {node} under {up}")
            depth[node] = depth[up] + 1
            if vocab_size <= ids[row][node] < vocab_size + num_masks:
                _check_mask(draft.source, ids[row], probes[row], node, up, vocab_size)
                if node < last:
                    got = f"node {last} after mask {node}"
                    raise DraftError(f"{draft.source}: a candidate follows mask tokens", got=got)
                continue
            if not 0 <= ids[row][node] < vocab_size:
                raise DraftError(
                    f"{draft.source} drafted a token outside the vocabulary",
                    got=ids[row][node],
                    expected=f"0 to {vocab_size - 1}" + (f", or one of {num_masks} mask tokens" if num_masks else ""),
                )
            if probes[row][node]:
                continue
            if ids[row][node] in undraftable:
                raise DraftError(
                    f"{draft.source_of(row)} drafted a token that stands for a picture",
                    got=ids[row][node],
                    expected="a token of the text",
                )
            if probes[row][up]:
                raise DraftError(f"{draft.source}: candidate {node} hangs under a probe")
            if depth[node] > budget.depth:
                raise DraftError(f"{draft.source} drafted too deep", got=depth[node], expected=f"<= {budget.depth}")


def _check_mask(source: str, ids: list[int], probes: list[bool], node: int, up: int, vocab_size: int) -> None:
    """Mask 0 hangs below the root or a candidate, mask j below mask j - 1, all of them behind the candidates.

    Candidates thus stand in the columns of plain decoding, and mask j foresees the token j + 1 places further.
    """
    mask = ids[node] - vocab_size
    if not probes[node]:
        raise DraftError(f"{source} drafted a mask token", got=f"candidate {node}", expected="a probe")
    if ids[up] != ids[node] - 1 if mask else probes[up]:
        expected = f"below mask {mask - 1}" if mask else "below the root or a candidate"
        raise DraftError(f"{source} misplaced mask {mask}", got=f"node {node} under {up}", expected=expected)
