"""Tokens that no draft may hold: those that stand for pictures in a prompt, which a text never has.

One place for all drafters: what ranks or draws a token goes through `bar` first, so that it has no probability; what
copies tokens ends before one; and the loop refuses a draft that has one (`decoding.contract`).
"""

from collections.abc import Collection

import torch
from torch import Tensor


def columns_of(banned_token_ids: Collection[int], draft_ids: Tensor) -> Tensor | None:
    """Columns of a draft's logits that belong to these tokens; None where there are none.

    draft_ids: the target's token of each column, [Vd].
    """
    if not banned_token_ids:
        return None
    tokens = torch.tensor(sorted(banned_token_ids), device=draft_ids.device)
    columns = torch.isin(draft_ids, tokens).nonzero().flatten()
    return columns if len(columns) else None


def columns_below(banned_token_ids: Collection[int], size: int) -> Tensor | None:
    """The same where each of `size` columns is the token of its number."""
    tokens = [token for token in sorted(banned_token_ids) if token < size]
    return torch.tensor(tokens) if tokens else None


def bar(scores: Tensor, columns: Tensor | None) -> Tensor:
    """The scores [..., Vd] with -inf in these columns; themselves where there are none."""
    return scores if columns is None else scores.index_fill(-1, columns.to(scores.device), -torch.inf)


def before_banned(tokens: list[int], banned_token_ids: Collection[int]) -> list[int]:
    """The tokens before the first that cannot be drafted."""
    end = next((i for i, token in enumerate(tokens) if token in banned_token_ids), len(tokens))
    return tokens[:end]
