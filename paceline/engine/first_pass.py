"""The first round of an answer: one pass over the last chunk of the prompt, the root and the first draft.

    last chunk + root                 plain decoding, and drafters that read the target's states or cache
    last chunk + root + candidates    drafters with `drafts_during_prefill`: a short answer may need this pass only
    last chunk, then root + ...       two passes, where a fused pass has other bits (`can_fuse_prefill`)

Rows with a chunk are computed one by one, the other rows of the batch together.
"""

import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..core.request import Sequence
from ..core.tree import TokenTree
from ..runner import ModelRunner


def deferred_tokens(runner: ModelRunner, seq: Sequence) -> list[int]:
    """The tokens before the root that were left to the first pass; empty after that pass."""
    return seq.token_ids[runner.cache.lengths[seq.slot] : -1] if seq.has_deferred_tokens else []


def forward(runner: ModelRunner, seqs: Seq[Sequence], tree: TokenTree) -> tuple[Tensor, list[bool], float]:
    """Logits [B, N, V] of the trees, which rows were fused with their prefill, and the seconds of those rows."""
    is_fused = [bool(deferred_tokens(runner, seq)) for seq in seqs]
    if not any(is_fused):
        return runner.forward([seq.slot for seq in seqs], tree), is_fused, 0.0
    begin = time.perf_counter()
    rows: list[Tensor | None] = [_fused(runner, seq, tree, b) if is_fused[b] else None for b, seq in enumerate(seqs)]
    next(row for row in rows if row is not None)[0, 0].item()  # waits for the device
    seconds = time.perf_counter() - begin
    others = [b for b, fused in enumerate(is_fused) if not fused]
    if others:
        logits = runner.forward([seqs[b].slot for b in others], tree.of_rows(others))
        for place, b in enumerate(others):
            rows[b] = logits[place]
    return torch.stack([row for row in rows if row is not None]), is_fused, seconds


def _fused(runner: ModelRunner, seq: Sequence, tree: TokenTree, row: int) -> Tensor:
    """Logits [N, V] of one row, 0 at its padding."""
    own = tree.of_rows([row]).trimmed()
    logits = runner.forward([seq.slot], own, deferred_tokens(runner, seq))[0]
    return torch.nn.functional.pad(logits, (0, 0, 0, tree.num_nodes - own.num_nodes))
