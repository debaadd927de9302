"""p, the target's law after every node of a tree: each node's processors see the path of that node.

prefix  t0 t1 t2 t3        node      0  1  2  3  4
tree    t3 ── a ── b       token     t3 a  b  c  d
         └─── c ── d       prefix of node 4 (d): t0 t1 t2 t3 c d, whatever stands in the rows between
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..core.outputs import TargetLaw
from ..core.request import Sequence
from ..core.tree import TokenTree
from ..errors import ConfigError, NumericsError
from .processors import is_edited, process
from .warpers import is_warped, warp


def target_law(
    logits: Tensor,  # [B, N, V]
    seqs: Seq[Sequence],  # B
    tree: TokenTree,
) -> TargetLaw:
    """The law of the token after each candidate, in the order that SamplingParams documents.

    logits: raw, of every node. The scores are float32; where every row is greedy and no row has a processor they are
    the logits themselves, unchecked. Some nodes keep their raw scores, because their law is never used: probes; nodes
    without finite logits (a rejected draft may overflow; the verifier refuses one it has to visit); nodes below a
    token that a processor forbade; nodes at or below a token that ends the answer (a processor of the user is thus
    never shown a past that plain decoding could not reach).

    NumericsError: the root's logits are NaN or have no finite maximum; names the row and the position.
    ConfigError: a processor that returns no scores or forbids every token.
    """
    greedy = [seq.params.temperature == 0 for seq in seqs]
    is_greedy = torch.tensor(greedy, device=logits.device)
    edited = [is_edited(seq) for seq in seqs]
    if all(greedy) and not any(edited):
        return TargetLaw(logits, is_greedy)
    skipped = _unused(logits, seqs, tree)
    warped = [is_warped(seq.params) for seq in seqs]
    # one private copy, unless nothing is to be written: the warpers leave their input as it is
    in_place = any(edited) or (any(warped) and (not all(warped) or _any(skipped)))
    scores = logits.to(torch.float32, copy=in_place)
    for row, seq in enumerate(seqs):
        if edited[row]:
            _process_row(scores, seq, tree, row, skipped[row])
    nodes = [
        (row, node) for row in range(len(seqs)) if warped[row] for node, skip in enumerate(skipped[row]) if not skip
    ]
    if nodes:
        scores = _warp_nodes(scores, seqs, nodes)
    return TargetLaw(scores, is_greedy)


def _any(flags: list[list[bool]]) -> bool:
    return any(any(row) for row in flags)


def _warp_nodes(scores: Tensor, seqs: Seq[Sequence], nodes: list[tuple[int, int]]) -> Tensor:
    """The scores with these (row, node) pairs warped; written in place unless the pairs are all there are."""
    batch, width, vocab = scores.shape
    params = [seqs[row].params for row, _ in nodes]
    flat = scores.reshape(batch * width, vocab)
    if len(nodes) == batch * width:
        return warp(flat, params).view(batch, width, vocab)
    index = torch.tensor([row * width + node for row, node in nodes], device=scores.device)
    return flat.index_copy_(0, index, warp(flat[index], params)).view(batch, width, vocab)


def _process_row(scores: Tensor, seq: Sequence, tree: TokenTree, row: int, skipped: list[bool]) -> None:
    """Apply the sequence's processors in place to each of its nodes that plain decoding could reach."""
    tokens: list[int] = tree.token_ids[row].tolist()
    parents: list[int] = tree.parents[row].tolist()
    past = torch.tensor(seq.token_ids, device=scores.device)
    drafted: dict[int, list[int]] = {}  # reachable node -> the drafted tokens of its path
    endings = {*(() if seq.params.ignore_eos else seq.eos_ids), *seq.params.stop_token_ids}
    for node, parent in enumerate(parents):
        if node > 0:
            if skipped[node] or parent not in drafted or tokens[node] in endings:
                continue
            if scores[row, parent, tokens[node]].item() == -torch.inf:
                continue
        drafted[node] = [*drafted[parent], tokens[node]] if node > 0 else []
        path = torch.tensor(drafted[node], dtype=past.dtype, device=past.device)
        ids = torch.cat([past, path]).unsqueeze(0)
        scores[row, node] = process(scores[row, node].clone().unsqueeze(0), ids, seq)[0]
        _check_allowed(scores[row, node], row, node, ids.shape[1])


def _check_allowed(scores: Tensor, row: int, node: int, position: int) -> None:
    peak = scores.max().item()
    where = f"row {row}, node {node}, position {position}"
    if peak == -torch.inf:
        raise ConfigError(f"the processors forbid every token ({where})", fix="loosen what they forbid")
    if not abs(peak) < torch.inf:  # NaN compares false
        raise NumericsError(f"the processors made NaN or infinite scores ({where})", got=peak)


def _unused(logits: Tensor, seqs: Seq[Sequence], tree: TokenTree) -> list[list[bool]]:
    """Marks probes and candidates without finite logits; NumericsError where the root, always visited, has none.

    A maximum is NaN as soon as one entry is.
    """
    peaks = logits.amax(-1)
    finite = torch.isfinite(peaks)
    if bool(finite.all()):
        return tree.is_probe.tolist()
    for row, seq in enumerate(seqs):
        if not finite[row, 0]:
            raise NumericsError(
                f"the target's logits are not finite (row {row}, node 0, position {len(seq.token_ids)})",
                got=f"a maximum of {peaks[row, 0].item()}",
                fix="load the model in bfloat16 or float32; float16 overflows in many models",
            )
    return (tree.is_probe | ~finite).tolist()
