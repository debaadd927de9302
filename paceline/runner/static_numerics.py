"""Do static passes give the bits of the other passes? Measured, as row multiples are.

With invariant numerics a tree that branches is computed as its chains, outside the static passes, and so is a tree of
more nodes than there are buckets for. Its rows must then equal, bit for bit, those of plain decoding within them.
"""

from typing import TYPE_CHECKING

import torch

from ..core.tree import TokenTree

if TYPE_CHECKING:
    from .model_runner import ModelRunner

_PREFIXES = (3, 61, 190, 250)  # the second and third let a pass end just past a block, the last past a column bucket
_PARENTS = (-1, 0, 0, 1, 2, 3, 4)
_PATHS = ((1, 3, 5), (2, 4, 6))
_CHAINS = (1, 3, 8, 17)


@torch.inference_mode()
def agrees_with_dynamic(runner: "ModelRunner", multiple: int | None) -> bool:
    """True iff rows of static and dynamic passes have the same bits with row counts that are multiples of `multiple`.

    Compared after several prefixes: chains, alone and beside a neighbour, and the paths of a tree that branches.
    """
    longest = min(max(_PREFIXES), runner.max_length - max(_CHAINS) - 1)
    if multiple is None or longest < 1:
        return False
    vocab, rng = runner.vocab_size, torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (longest + max(_CHAINS),), generator=rng).tolist()
    count = min(2, runner.cache.num_slots)
    slots = [runner.cache.allocate() for _ in range(count)]
    static, runner.row_multiple, runner.invariant = runner.static, multiple, True
    try:
        for prefix in sorted({min(p, longest) for p in _PREFIXES}):
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
    nodes, device = [tokens[i] for i in range(len(_PARENTS))], runner.loaded.device
    tree = TokenTree.from_lists([nodes], [list(_PARENTS)], device)
    branches = runner.forward(slots[:1], tree).logits[0]  # dynamic: it branches
    pairs = [(_rows(runner, slots[:1], [nodes[i] for i in (0, *p)]), branches[[0, *p]]) for p in _PATHS]
    static = runner.static
    for count in _CHAINS:
        chain = tokens[:count]
        runner.static = None
        expected = _rows(runner, slots[:1], chain)
        runner.static = static
        pairs += [(_rows(runner, batch, chain), expected) for batch in (slots[:1], slots)]
    return all(torch.equal(got, want) for got, want in pairs)


def _rows(runner: "ModelRunner", slots: list[int], chain: list[int]) -> torch.Tensor:
    """Logits [N, V] of the first row."""
    return runner.forward(slots, TokenTree.chain([chain] * len(slots), runner.loaded.device)).logits[0]
