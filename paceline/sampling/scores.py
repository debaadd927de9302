"""Operations on rows of scores: the largest, log-probabilities for the user, and tokens that no draft may hold.

Banned tokens are the placeholders of images. Drafters that rank or sample tokens call `mask_banned` first, drafters
that copy tokens stop before a banned one, and the loop refuses a draft that has one (`engine.contract`).
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..core.request import TokenLogprob
from ..core.rng import Purpose, gumbel
from ..kernels.library import draw, reads


def argmax(scores: Tensor) -> Tensor:
    """Index of the first largest score along the last dimension: [..., V] -> [...], int64. NaN counts as the largest.

    On CPU, numpy is ten times as fast as torch. It has no bfloat16, so bfloat16 is converted to float32 first.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    return torch.as_tensor(wide.numpy().argmax(-1))


def gumbel_argmax(
    scores: Tensor,  # [K, V]
    seeds: Sequence[int],  # K
    positions: Sequence[int],  # K
) -> Tensor:  # [K], int64
    """The target's choice at each position: argmax(scores + noise), a draw from the softmax of the scores.

    The Gumbel-max draw (Gumbel 1954; Maddison et al. 1411.0030). The native library skips the noise of tokens that
    cannot win. Rows that it leaves undecided get the noise of every token, as do scores that are not float32.
    """
    tokens, rows = [-1] * len(scores), [*range(len(scores))]
    if scores.dtype is torch.float32 and reads(scores):
        tokens = draw(scores, seeds, positions, Purpose.TARGET)
        rows = [row for row in rows if tokens[row] < 0]
    chosen = torch.tensor(tokens, dtype=torch.long, device=scores.device)
    if rows:
        keys = torch.tensor([[seeds[row], positions[row]] for row in rows], device=scores.device)
        noise = gumbel(keys[:, 0], keys[:, 1:], Purpose.TARGET, scores.shape[1]).squeeze(1)
        chosen[rows] = argmax(scores[rows] + noise)
    return chosen


def token_logprob(
    logits_row: Tensor,  # [V]
    token: int,
    k: int,
) -> TokenLogprob:
    """Natural-log probability of `token` and of the `k` most probable tokens (-1: all), in descending order.

    logits_row: the target's raw logits, any floating dtype; the softmax is taken in float32.
    """
    logprobs = torch.log_softmax(logits_row.float(), dim=-1)
    vocab = logprobs.shape[-1]
    best = torch.topk(logprobs, vocab if k < 0 else min(k, vocab))
    top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top, int((logprobs > logprobs[token]).sum()) + 1)


def banned_columns(banned_token_ids: Collection[int], draft_ids: Tensor) -> Tensor | None:
    """The columns of a draft's logits that belong to these tokens; None if there are none.

    draft_ids: the target's token of each column, [Vd].
    """
    if not banned_token_ids:
        return None
    tokens = torch.tensor(sorted(banned_token_ids), device=draft_ids.device)
    columns = torch.isin(draft_ids, tokens).nonzero().flatten()
    return columns if len(columns) else None


def mask_banned(scores: Tensor, columns: Tensor | None) -> Tensor:
    """The scores [..., Vd] with -inf in these columns; unchanged if `columns` is None."""
    return scores if columns is None else scores.index_fill(-1, columns.to(scores.device), -torch.inf)


def before_banned(tokens: list[int], banned_token_ids: Collection[int]) -> list[int]:
    """The tokens before the first banned one."""
    end = next((i for i, token in enumerate(tokens) if token in banned_token_ids), len(tokens))
    return tokens[:end]
