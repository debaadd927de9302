"""Are the bits of a row independent of how many rows share its pass? Measured here, not assumed.

A matrix product picks its kernel by shape, and another kernel sums in another order: in bfloat16 that flips near-ties,
and a speculative answer drifts from the plain one. Usually all row counts from some small number on, or all multiples
of one, share a kernel. Padding every pass to that multiple makes rows repeat bit for bit; while decoding is bound by
reading weights, the padding costs next to nothing.
"""

from typing import TYPE_CHECKING

import torch

from ..core.tree import TokenTree
from ..errors import NumericsError
from .loaded import LoadedModel

if TYPE_CHECKING:
    from .model_runner import ModelRunner

MULTIPLES = (2, 4, 8, 16)
"""Never fewer than 2 rows: one row is a matrix-vector product nearly everywhere."""
_PASSES = ((3, 32), (61, 32), (190, 128))
"""Prefix and most rows: the second and third end just past a block of columns, the last is as wide as several trees."""
_PARENTS = (-1, 0, 0, 1, 2, 2, 4, 4)


@torch.inference_mode()
def measure_row_multiple(runner: "ModelRunner") -> int | None:
    """The smallest multiple in `MULTIPLES` whose row counts all give the same bits; None if there is none.

    Measured on the very passes that invariant numerics takes: chains of many lengths, and a tree that branches.
    """
    loaded = runner.loaded
    if loaded.mixes_rows or not loaded.attends_trees:
        return None
    rng = torch.Generator().manual_seed(0)
    vocab = loaded.vocab_size
    room = runner.max_length - 1
    fitting = sorted({(min(prefix, room - rows), rows) for prefix, rows in _PASSES if rows < room})
    if not fitting:
        return None
    tokens = torch.randint(vocab, (max(p + r for p, r in fitting),), generator=rng).tolist()
    slot = runner.cache.allocate()
    runner.invariant = True
    try:
        return next((m for m in MULTIPLES if _holds(runner, slot, tokens, fitting, m)), None)
    finally:
        runner.invariant, runner.row_multiple = False, 1
        runner.cache.release(slot)


def _holds(runner: "ModelRunner", slot: int, tokens: list[int], passes: list[tuple[int, int]], multiple: int) -> bool:
    """Whether rows keep their bits behind each prefix, whatever the number of rows and the shape of the tree."""
    for prefix, rows in passes:
        runner.cache.truncate(slot, 0)
        runner.prefill(slot, tokens[:prefix])
        chain = tokens[prefix : prefix + rows]
        full = _logits(runner, slot, chain)
        if not _repeats(runner, slot, chain, full, multiple):
            return False
        if not _branches(runner, slot, chain[: len(_PARENTS)], multiple):
            return False
    return True


def _logits(runner: "ModelRunner", slot: int, chain: list[int]) -> torch.Tensor:
    return runner.forward([slot], TokenTree.chain([chain], runner.loaded.device)).logits[0]


def _repeats(runner: "ModelRunner", slot: int, chain: list[int], full: torch.Tensor, multiple: int) -> bool:
    some = {multiple, 2 * multiple, 3 * multiple, 4 * multiple, 8, 16, 24, 48, 64}
    counts = sorted(some & set(range(multiple, len(chain), multiple)))
    return all(torch.equal(_logits(runner, slot, chain[:n]), full[:n]) for n in counts)


def _branches(runner: "ModelRunner", slot: int, tokens: list[int], multiple: int) -> bool:
    """Whether every node of a tree has the bits of its own path."""
    runner.row_multiple = multiple
    tree = TokenTree.from_lists([tokens], [list(_PARENTS)], runner.loaded.device)
    rows = runner.forward([slot], tree).logits[0]
    paths = [[0, *tree.path_to(0, leaf)] for leaf in set(range(len(_PARENTS))) - set(_PARENTS)]
    equal = all(torch.equal(_logits(runner, slot, [tokens[i] for i in path]), rows[path]) for path in paths)
    runner.row_multiple = 1
    return equal


def refuse(loaded: LoadedModel) -> NumericsError:
    """Why `numerics="invariant"` cannot be had."""
    if loaded.mixes_rows:
        why = "experts see as many rows as are routed to them, so a row's numerics depend on the others"
    elif not loaded.attends_trees:
        why = "this architecture brings an attention of its own"
    else:
        why = f"rows differ between row counts that are multiples of {max(MULTIPLES)}, or between a tree and its paths"
    return NumericsError(
        'numerics="invariant" cannot be had for this model on this device',
        got=why,
        fix='use numerics="fast"; `paceline check` reports the rounding ties that remain',
    )


_STATIC_PREFIXES = (
    3,
    61,
    190,
    250,
)  # the second and third let a pass end just past a block, the last past a column bucket
_STATIC_PARENTS = (-1, 0, 0, 1, 2, 3, 4)
_STATIC_PATHS = ((1, 3, 5), (2, 4, 6))
_STATIC_CHAINS = (1, 3, 8, 17)


@torch.inference_mode()
def agrees_with_dynamic(runner: "ModelRunner", multiple: int | None) -> bool:
    """True iff rows of static and dynamic passes have the same bits with row counts that are multiples of `multiple`.

    Compared after several prefixes: chains, alone and beside a neighbour, and the paths of a tree that branches.
    """
    longest = min(max(_STATIC_PREFIXES), runner.max_length - max(_STATIC_CHAINS) - 1)
    if multiple is None or longest < 1:
        return False
    vocab, rng = runner.vocab_size, torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (longest + max(_STATIC_CHAINS),), generator=rng).tolist()
    count = min(2, runner.cache.num_slots)
    slots = [runner.cache.allocate() for _ in range(count)]
    static, runner.row_multiple, runner.invariant = runner.static, multiple, True
    try:
        for prefix in sorted({min(p, longest) for p in _STATIC_PREFIXES}):
            for slot in slots:
                runner.cache.truncate(slot, 0)
            for slot, length in zip(slots, (prefix, max(1, prefix // 2)), strict=False):
                runner.prefill(slot, tokens[:length])
            if not _agrees(runner, slots, tokens[prefix:]):
                return False
        return True
    finally:
        runner.static, runner.row_multiple, runner.invariant = static, 1, False
        for slot in slots:
            runner.cache.release(slot)


def _agrees(runner: "ModelRunner", slots: list[int], tokens: list[int]) -> bool:
    nodes, device = [tokens[i] for i in range(len(_STATIC_PARENTS))], runner.loaded.device
    tree = TokenTree.from_lists([nodes], [list(_STATIC_PARENTS)], device)
    branches = runner.forward(slots[:1], tree).logits[0]  # dynamic: it branches
    pairs = [(_rows(runner, slots[:1], [nodes[i] for i in (0, *p)]), branches[[0, *p]]) for p in _STATIC_PATHS]
    static = runner.static
    for count in _STATIC_CHAINS:
        chain = tokens[:count]
        runner.static = None
        expected = _rows(runner, slots[:1], chain)
        runner.static = static
        pairs += [(_rows(runner, batch, chain), expected) for batch in (slots[:1], slots)]
    return all(torch.equal(got, want) for got, want in pairs)


def _rows(runner: "ModelRunner", slots: list[int], chain: list[int]) -> torch.Tensor:
    """Logits [N, V] of the first row."""
    return runner.forward(slots, TokenTree.chain([chain] * len(slots), runner.loaded.device)).logits[0]
