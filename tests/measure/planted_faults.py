"""Faults for `test_check_mutants`, each planted with monkeypatch where native passes and those of transformers meet."""

import torch

from paceline.core.tree import TokenTree
from paceline.target import LoadedModel, SlotCache

HIDDEN = 4
"""The cached column that mutants hide."""


def verifies(layout) -> bool:
    """Whether the pass holds a draft, and not a prompt or the one node of plain decoding (and what pads it)."""
    if layout.tree is None:
        return False
    text = layout.num_nodes - (layout.head_rows or layout.num_nodes)
    return (layout.num_given or layout.num_nodes) - text > 1


def at_pass(monkeypatch, damage):
    """damage(layout, cache) before each pass; what it returns is called behind it."""
    right = LoadedModel.forward

    def forward(loaded, token_ids, layout, cache, states=None):
        mend = damage(layout, cache)
        logits = right(loaded, token_ids, layout, cache, states)
        if mend is not None:
            mend()
        return logits

    monkeypatch.setattr(LoadedModel, "forward", forward)


def hide(monkeypatch, hides):
    """Rows of passes for which `hides` holds read zeros in one committed column."""

    def damage(layout, cache):
        rows = zip(layout.slots or range(len(layout.starts)), layout.starts, strict=True) if hides(layout) else ()
        columns = [layer[s, :, HIDDEN] for s, start in rows if start > HIDDEN for layer in (*cache.keys, *cache.values)]
        were = [column.clone() for column in columns]
        for column in columns:
            column.zero_()
        return lambda: [column.copy_(was) for column, was in zip(columns, were, strict=True)]

    at_pass(monkeypatch, damage)


def hides_a_column_from_drafts(monkeypatch):
    hide(monkeypatch, verifies)


def hides_a_column_from_plain_decoding_too(monkeypatch):
    """Both sides are wrong alike: their tokens and bits agree."""
    hide(monkeypatch, lambda layout: layout.tree is not None)


def at_commit(monkeypatch, damage):
    """damage(cache, slot, start, nodes) after each commit; start: the column of the root."""
    right = SlotCache.commit

    def commit(cache, slot, nodes):
        start = cache.lengths[slot]
        right(cache, slot, nodes)
        damage(cache, slot, start, nodes)

    monkeypatch.setattr(SlotCache, "commit", commit)


def round_keys(cache, slot, first, dtype=torch.bfloat16):
    for keys in cache.keys:
        kept = keys[slot, :, first : cache.lengths[slot]]
        kept.copy_(kept.to(dtype).to(kept.dtype))


def rounds_accepted_keys_to_bfloat16(monkeypatch):
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start + 1))


def rounds_accepted_keys_to_float16(monkeypatch):
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start + 1, torch.float16))


def rounds_every_key(monkeypatch):
    """Those of plain decoding too: both sides are wrong alike."""
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start))


def keeps_a_rejected_column(monkeypatch):
    """The last accepted column is overwritten by the one behind it, a rejected guess or a leftover."""

    def damage(cache, slot, start, nodes):
        if nodes:
            last = start + len(nodes)
            for layer in (*cache.keys, *cache.values):
                layer[slot, :, last] = layer[slot, :, last + 1]

    at_commit(monkeypatch, damage)


def shifts_the_positions_of_a_draft(monkeypatch):
    def damage(layout, cache):
        if verifies(layout):
            layout.offsets = [offset + 1 for offset in layout.offsets or [0] * len(layout.starts)]

    at_pass(monkeypatch, damage)


def mistakes_the_parent_of_the_third_token(monkeypatch):
    """It stands where the second does, and does not see it."""

    def damage(layout, cache):
        text = layout.num_nodes - (layout.head_rows or layout.num_nodes)
        if verifies(layout) and layout.num_nodes - text > 2:
            ids, parents, probes = layout.tree.lists
            if parents[0][text + 2] == text + 1:
                parents = [[*row[: text + 2], text, *row[text + 3 :]] for row in parents]
                layout.tree = TokenTree.from_lists(ids, parents, layout.tree.device, probes)

    at_pass(monkeypatch, damage)


def keeps_the_rows_behind_the_accepted_ones(monkeypatch):
    right = SlotCache.commit
    monkeypatch.setattr(SlotCache, "commit", lambda cache, slot, nodes: right(cache, slot, [n + 1 for n in nodes]))


def rounds_accepted_keys_to_8_bits(monkeypatch):
    at_commit(monkeypatch, lambda cache, slot, start, nodes: round_keys(cache, slot, start + 1, torch.float8_e4m3fn))


MUTANTS = [
    hides_a_column_from_drafts,
    hides_a_column_from_plain_decoding_too,
    rounds_accepted_keys_to_bfloat16,
    rounds_accepted_keys_to_float16,
    rounds_every_key,
    keeps_a_rejected_column,
    shifts_the_positions_of_a_draft,
    mistakes_the_parent_of_the_third_token,
    keeps_the_rows_behind_the_accepted_ones,
]
OF_BOTH_SIDES = (hides_a_column_from_plain_decoding_too, rounds_every_key)
