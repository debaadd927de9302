"""The end of a prompt, its first token and the first draft in one pass: a short answer may cost no other.

    rows        c0 c1 ... c_{k-1} | root x1  x2  x3 | pad        c: the text's last chunk, all but the root
    columns     s ....... s+k-1   | s+k ......              behind the s columns that are cached
    products    ------- one over all rows, so that the weights are read once --------
    attention   [as in a prefill] | [as in a pass over the tree]

With invariant numerics every row has the bits that it has in two passes. Attention is computed part by part, by the
very calls of the two passes; what is left are operations row by row, the matrix products among them, and whether those
give a row the same bits at all these row counts is measured when the first decoder is made. Where they do not, prompts
are read as ever, and the first round takes a pass of its own. Prompts are padded alike whatever was measured, so that
every decoder on a runner reads them in the same shapes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..core.tree import TokenTree
from .fused import project
from .joined import JoinedLayout
from .kv_cache import round_up
from .layout import PassLayout, PromptRows

if TYPE_CHECKING:
    from .hf_adapter import LoadedModel
    from .model_runner import ModelRunner

_CASES = ((0, 2, 3), (0, 79, 1), (3, 61, 7), (62, 69, 3), (190, 9, 7))
"""Columns before the text, rows of it, around blocks of 64 columns, and nodes: 7 of them branch."""
_PARENTS = (-1, 0, 0, 1, 2, 2, 4)
MOST_NODES = 64
"""Of a tree that shares a pass with text: as far as it is measured."""
_MEASURED: "WeakKeyDictionary[LoadedModel, dict[tuple[int, ...], bool]]" = WeakKeyDictionary()
"""What was found, by model and all it depends on."""


def text_layout(runner: "ModelRunner", slot: int, rows: int) -> PassLayout:
    """How a chunk of `rows` tokens lies behind what the slot holds, not padded."""
    return PassLayout(
        [runner.cache.lengths[slot]],
        rows,
        None,
        runner.invariant,
        runner.row_multiple,
        runner.max_length,
        [slot],
        device=runner.loaded.device,
        offsets=[runner.cache.offsets[slot]],
    )


@torch.inference_mode()
def read_and_verify(runner: "ModelRunner", slot: int, text: Sequence[int], tree: TokenTree) -> Tensor:
    """One pass over the rest of a text and the tree [1, N] behind it; the text is kept. Logits [1, N, V] of the tree.

    Mask tokens are not taken. text: at most a chunk of a prefill.
    """
    device, count, nodes = runner.loaded.device, len(text), tree.num_nodes
    if runner.loaded.native is not None:
        return _native(runner, slot, text, tree)
    start, multiple = runner.cache.lengths[slot], runner.row_multiple
    # the tree is padded as in a pass of its own, and then the whole: attention by hand minds how many rows it is given
    padded = tree.padded(round_up(nodes, multiple))
    total = round_up(count + padded.num_nodes, multiple)
    reading = text_layout(runner, slot, count)
    verifying = PassLayout(
        [start + count], padded.num_nodes, padded, runner.invariant, multiple, runner.max_length, [slot], nodes, device,
        offsets=[runner.cache.offsets[slot]],
    )  # fmt: skip
    layout = JoinedLayout(
        [start], total, None, runner.invariant, multiple, runner.max_length, [slot], device=device,
        parts=(reading, verifying), head_rows=round_up(total - count, multiple),
    )  # fmt: skip
    runner.cache.begin([slot], total, drafts=True, whole=runner.loaded.attends_trees, text=count)
    ids = torch.cat([torch.tensor([list(text)], device=device), padded.padded(total - count).token_ids.to(device)], 1)
    states = runner.asked()
    logits = runner.loaded.forward(ids, layout, runner.cache, states)
    if states is not None:
        given = {layer: state[:, : count + nodes] for layer, state in states.items()}
        runner.states.write([slot], [start], given, runner.cache.capacity)
    runner.cache.lengths[slot] += count
    first = logits.shape[1] - (total - count)
    return logits[:, first : first + nodes]


def _native(runner: "ModelRunner", slot: int, text: Sequence[int], tree: TokenTree) -> Tensor:
    """The text is the trunk of the tree."""
    count, start = len(text), runner.cache.lengths[slot]
    whole = tree.behind(text)
    runner.cache.begin([slot], whole.num_nodes, drafts=True, text=count)
    layout = PassLayout(
        [start], whole.num_nodes, whole, True, 1, runner.max_length, [slot], head_rows=tree.num_nodes,
        offsets=[runner.cache.offsets[slot]],
    )  # fmt: skip
    states = runner.asked()
    logits = runner.loaded.forward(whole.token_ids, layout, runner.cache, states)
    if states is not None:
        runner.states.write([slot], [start], states, runner.cache.capacity)
    runner.cache.lengths[slot] += count
    return logits


def padded_prefill(
    runner: "ModelRunner", slot: int, chunk: Sequence[int], rows: PromptRows | None = None
) -> tuple[Tensor, PassLayout]:
    """Tokens [1, R] and layout of a chunk of a prefill, padded to where rows have the same bits in every pass.

    rows: what a chunk of a prompt with pictures reads in the place of its tokens.
    """
    count = len(chunk)
    total = round_up(count, runner.row_multiple) if runner.invariant else count
    reading = text_layout(runner, slot, count)
    reading.rows = rows
    ids = torch.tensor([[*chunk, *[0] * (total - count)]], device=runner.loaded.device)
    if total == count:
        return ids, reading
    layout = JoinedLayout(
        reading.starts, total, None, runner.invariant, runner.row_multiple, runner.max_length, [slot],
        device=runner.loaded.device, parts=(reading,), rows=None if rows is None else rows.padded(total),
    )  # fmt: skip
    return ids, layout


@torch.inference_mode()
def measure_joins(runner: "ModelRunner", chunk: int) -> bool:
    """Whether texts and drafts that share a pass have the bits of two passes, for texts of up to `chunk` tokens.

    The whole pass is compared at a few sizes; at the largest ones only the matrix products, once for each shape.
    """
    if not runner.invariant:
        return True
    found = _MEASURED.setdefault(runner.loaded, {})
    key = (runner.row_multiple, runner.max_length, chunk, torch.get_num_threads())
    if key not in found:
        most = round_up(chunk + MOST_NODES, runner.row_multiple)
        found[key] = _products_repeat(runner, most) and _passes_repeat(runner)
    return found[key]


def _passes_repeat(runner: "ModelRunner") -> bool:
    """Whether the model gives the same bits in one pass and in two, at a few sizes."""
    room = runner.max_length - len(_PARENTS) - 1
    cases = [case for case in _CASES if sum(case[:2]) <= room]
    tokens = torch.randint(runner.vocab_size, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    slot, kept = runner.cache.allocate(), runner.states.kept
    runner.place(slot, None)
    runner.states.kept = False
    try:
        return bool(cases) and all(_same_bits(runner, slot, tokens, *case) for case in cases)
    finally:
        runner.states.kept = kept
        runner.cache.release(slot)


def _same_bits(runner: "ModelRunner", slot: int, tokens: list[int], start: int, rows: int, nodes: int) -> bool:
    """Logits of a chain or, at 7 nodes, of a branching tree, and all keys and values, in one pass and in two."""
    end, device = start + rows, runner.loaded.device
    own = tokens[end : end + nodes]
    runner.cache.truncate(slot, 0)
    runner.prefill(slot, tokens[:start])
    branches = nodes == len(_PARENTS)
    tree = TokenTree.from_lists([own], [list(_PARENTS)], device) if branches else TokenTree.chain([own], device)
    seen: list[list[Tensor]] = []
    for joined in (True, False):
        runner.cache.truncate(slot, start)
        if joined:
            logits = read_and_verify(runner, slot, tokens[start:end], tree)
        else:
            runner.prefill(slot, tokens[start:end])
            logits = runner.forward([slot], tree).logits
        columns = slice(start, end + tree.num_nodes)
        held = [layer[slot, :, columns].clone() for layer in (*runner.cache.keys, *runner.cache.values)]
        seen.append([logits.clone(), *held])
    return all(torch.equal(one, two) for one, two in zip(*seen, strict=True))


def _products_repeat(runner: "ModelRunner", most: int) -> bool:
    """Whether each kind of linear layer gives a row the same bits among few rows, many, and `most`, wherever it is."""
    head, kinds = runner.loaded.model.get_output_embeddings(), dict[tuple[object, ...], nn.Module]()
    for module in runner.loaded.model.modules():
        width = getattr(module, "in_features", getattr(module, "nx", None))  # transformers' Conv1D says nx
        if isinstance(width, int) and module is not head:
            outs = getattr(module, "out_features", getattr(module, "nf", None))
            kinds.setdefault((type(module), width, outs), module)
    rng, dtype, multiple = torch.Generator().manual_seed(0), runner.loaded.dtype, runner.row_multiple
    counts = {round_up(n, multiple) for n in (1, 2 * multiple, 24, 40, 64, 100, 200, 384, 512) if n < most}
    for (_, width, outs), module in kinds.items():
        assert isinstance(width, int)
        assert isinstance(outs, int)
        x = torch.randn(most, width, generator=rng).to(runner.loaded.device, dtype)
        plus = torch.randn(most, outs, generator=rng).to(runner.loaded.device, dtype)
        for more in (None, plus):
            full = project(module, x, None if more is None else more.clone())
            for n in sorted(counts):
                for rows in (slice(0, n), slice(most - n, most)):
                    part = project(module, x[rows].clone(), None if more is None else more[rows].clone())
                    if not torch.equal(part, full[rows]):
                        return False
    return True
