"""The first round of an answer: one pass over the last chunk of the prompt, the root and the first draft.

    last chunk + root                 plain decoding, and drafters that read the target's states or cache
    last chunk + root + candidates    drafters with `drafts_during_prefill`: a short answer may need this pass only
    last chunk, then root + ...       two passes, where a fused pass has other bits (`PassSettings.can_fuse_prefill`)

Rows with a chunk are computed one by one, the other rows of the batch together.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..target import ModelRunner


def deferred_tokens(runner: ModelRunner, seq: TokenSequence) -> list[int]:
    """The tokens before the root that were left to the first pass; empty after that pass."""
    return seq.token_ids[runner.cache.lengths[seq.slot] : -1] if seq.has_deferred_tokens else []


def forward(
    runner: ModelRunner, seqs: Sequence[TokenSequence], tree: TokenTree, keep_states: bool
) -> tuple[Tensor, dict[int, float]]:
    """Logits [B, N, V] of the trees, and the seconds of each row that was fused with its prefill."""
    seconds, rows = dict[int, float](), dict[int, Tensor]()
    for row, seq in enumerate(seqs):
        if deferred_tokens(runner, seq):
            begin = time.perf_counter()
            rows[row] = _fused(runner, seq, tree, row, keep_states)
            rows[row][0, 0].item()  # waits for the device
            seconds[row] = time.perf_counter() - begin
    if not rows:
        return runner.forward([seq.slot for seq in seqs], tree, keep_states=keep_states), seconds
    if others := [row for row in range(len(seqs)) if row not in rows]:
        logits = runner.forward([seqs[row].slot for row in others], tree.of_rows(others), keep_states=keep_states)
        rows |= dict(zip(others, logits, strict=True))
    return torch.stack([rows[row] for row in range(len(seqs))]), seconds


def _fused(runner: ModelRunner, seq: TokenSequence, tree: TokenTree, row: int, keep_states: bool) -> Tensor:
    """Logits [N, V] of one row, 0 at its padding."""
    own = tree.of_rows([row]).trimmed()
    logits = runner.forward([seq.slot], own, deferred_tokens(runner, seq), keep_states=keep_states)[0]
    return torch.nn.functional.pad(logits, (0, 0, 0, tree.num_nodes - own.num_nodes))
