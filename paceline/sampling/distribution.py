"""p, the target's distribution after every node of a tree. Processors are applied on the path of each node."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..core.walk import TargetDistribution
from ..errors import ConfigError, NumericsError
from .processors import is_edited, process
from .warpers import is_warped, on_rows, warp


def target_distribution(
    logits: Tensor,  # [B, N, V]
    seqs: Sequence[TokenSequence],  # B
    tree: TokenTree,
) -> TargetDistribution:
    """The distribution of the token after each candidate, in the order that SamplingParams documents.

    A node is processed when a verifier reads it, so processors are called as in plain decoding, see docs/exactness.md.
    If one raises, or leaves NaN or no token, that becomes the error of the answer, as in plain decoding.

    logits: the raw logits of every node, which are not modified. Processed scores are float32; a greedy row without
        processors keeps its logits, in their dtype.
    """
    is_greedy = [seq.params.temperature == 0 for seq in seqs]
    if all(_is_raw(seq) for seq in seqs):
        return TargetDistribution(logits, is_greedy)
    errors = dict[tuple[int, int], Exception]()
    return TargetDistribution(logits, is_greedy, partial(_process, seqs, tree, errors), errors)


def _is_raw(seq: TokenSequence) -> bool:
    """Whether the scores of this sequence are its logits."""
    return seq.params.temperature == 0 and not is_edited(seq)


def _process(
    batch: Sequence[TokenSequence],
    tree: TokenTree,
    errors: dict[tuple[int, int], Exception],
    logits: Tensor,  # [K, V]
    rows: list[int],
    nodes: list[int],
) -> Tensor:  # [K, V]
    """Apply processors and warpers to some nodes, each on the path that leads to it.

    logits: a private copy. The maximum of a row without a distribution is not finite.
    """
    seqs = [batch[row] for row in rows]
    raw = [_is_raw(seq) for seq in seqs]
    if all(raw):
        return logits
    scores = logits.float()
    finite = scores.amax(-1).isfinite().tolist()  # a maximum is NaN as soon as one entry is
    for k, (row, node, seq) in enumerate(zip(rows, nodes, seqs, strict=True)):
        if raw[k]:
            continue
        try:
            path = tree.rows[row].tokens_to(node)
            where = f"token {seq.num_output + len(path) + 1} of the answer"
            if not finite[k]:
                raise _not_finite(where, logits[k])
            if is_edited(seq):
                scores[k] = _processed(scores[k : k + 1], seq, path)
                _check_allowed(scores[k], where)
        except Exception as error:  # a user's processor may raise anything; the answer may end before this node
            errors[row, node] = error
            scores[k] = torch.nan
    warped = [k for k, seq in enumerate(seqs) if is_warped(seq.params) and (rows[k], nodes[k]) not in errors]
    scores = on_rows(warp, scores, [seq.params for seq in seqs], warped)
    if any(raw):  # raw float64 logits keep their precision
        scores = torch.where(torch.tensor(raw, device=scores.device).unsqueeze(1), logits, scores)
    return scores


def _processed(scores: Tensor, seq: TokenSequence, path: list[int]) -> Tensor:  # [1, V] -> [V]
    """Scores after a path of drafted tokens; NaN if the answer ends with the path."""
    may_raise = seq.params.logits_processors or seq.grammar is not None
    if may_raise and path and seq.ends_with(path):
        return torch.full_like(scores[0], torch.nan)
    ids = torch.tensor([[*seq.token_ids, *path]], device=scores.device)
    return process(scores, ids, seq)[0]


def _check_allowed(scores: Tensor, where: str) -> None:
    peak = scores.max().item()
    if peak == -torch.inf:
        raise ConfigError(f"the processors forbid every token (at {where})", fix="loosen what they forbid")
    if not abs(peak) < torch.inf:  # NaN compares false
        raise NumericsError(f"the processors made NaN or infinite scores (at {where})", got=peak)


def _not_finite(where: str, logits: Tensor) -> NumericsError:
    return NumericsError(
        f"the target's logits are not finite (at {where})",
        got=f"a maximum of {logits.amax().item()}",
        fix="load the model in bfloat16 or float32; float16 overflows in many models",
    )
