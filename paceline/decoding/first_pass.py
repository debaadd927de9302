"""The first round of an answer: the target reads the prompt's end, the root and what was drafted so early in one pass.

    prompt's last chunk + root                 plain decoding, and drafters that need what the target's pass leaves
    prompt's last chunk + root + candidates    drafters that need nothing of it: a short answer may cost this pass alone
    prompt's last chunk, then root + ...       2 passes: where one pass has other bits (`can_fuse_prefill`)

Rows that read are verified one by one, the rest of a batch together, as ever.
"""

import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..core.request import Sequence
from ..core.tree import TokenTree
from ..runner import ModelRunner


def unread(runner: ModelRunner, seq: Sequence) -> list[int]:
    """Tokens before the root that were left to the first pass; none after it, whatever the cache holds."""
    return seq.token_ids[runner.cache.lengths[seq.slot] : -1] if seq.is_unread else []


def forward(runner: ModelRunner, seqs: Seq[Sequence], tree: TokenTree) -> tuple[Tensor, list[bool], float]:
    """Logits [B, N, V] of the trees, which rows were verified as their prompts were read, and the seconds of that."""
    joins = [bool(unread(runner, seq)) for seq in seqs]
    if not any(joins):
        return runner.forward([seq.slot for seq in seqs], tree), joins, 0.0
    begin = time.perf_counter()
    rows: list[Tensor | None] = [_joined(runner, seq, tree, b) if joins[b] else None for b, seq in enumerate(seqs)]
    next(row for row in rows if row is not None)[0, 0].item()  # waits for the device
    seconds = time.perf_counter() - begin
    others = [b for b, join in enumerate(joins) if not join]
    if others:
        logits = runner.forward([seqs[b].slot for b in others], tree.of_rows(others))
        for place, b in enumerate(others):
            rows[b] = logits[place]
    return torch.stack([row for row in rows if row is not None]), joins, seconds


def _joined(runner: ModelRunner, seq: Sequence, tree: TokenTree, row: int) -> Tensor:
    """Logits [N, V] of one row, 0 at the probes that only pad it."""
    own = tree.of_rows([row]).trimmed()
    logits = runner.forward([seq.slot], own, unread(runner, seq))[0]
    return torch.nn.functional.pad(logits, (0, 0, 0, tree.num_nodes - own.num_nodes))
