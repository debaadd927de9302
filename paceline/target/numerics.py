"""Numerics: whether the bits of a row depend on the number of rows in its pass. In our kernels they never do.

In torch a matrix product selects its kernel by shape, and another kernel sums in another order. In bfloat16 this
decides near ties differently, and a speculative answer deviates from the plain one. On a CPU, usually all row counts
that are multiples of a small number use the same kernel: padding every pass to that multiple makes rows equal bit by
bit. It is measured. On a GPU, models that run in torch have fast numerics.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from ..core.tree import TokenTree
from ..errors import NumericsError
from ..hf.describe import is_described
from .loaded import LoadedModel
from .runner import ModelRunner
from .self_test import check_image, check_tree
from .settings import PassSettings

MULTIPLES = (2, 4, 8, 16)
"""Never fewer than 2 rows: one row is a matrix-vector product nearly everywhere."""
_PASSES = ((3, 32), (61, 32), (190, 128))
"""Prefix and row count: the second and third prefix end just before a block, the last is as wide as several trees."""
_PARENTS = (-1, 0, 0, 1, 2, 2, 4, 4)
_ON_GPU = "on a GPU the bits of its products depend on the number of rows"


def make_runner(
    loaded: LoadedModel,
    max_num_seqs: int = 8,
    max_length: int | None = None,
    invariant: bool | None = False,
) -> ModelRunner:
    """A runner. Native passes have invariant numerics; others on a CPU use a row multiple that is measured.

    invariant: True requires that the bits of a row do not depend on the other rows of its pass, None prefers it.

    Raises `NumericsError` if invariance is required and impossible, `CacheFull` if the memory cannot hold the cache,
    `IncompatibleModels` as `self_test.check`.
    """
    runner = ModelRunner(loaded, max_num_seqs, max_length)
    check_tree(runner)  # with these slots; it also allocates the cache, or raises `CacheFull`
    if loaded.is_native or invariant is False:
        return runner
    multiple = measure_row_multiple(runner)
    if multiple is not None:
        runner.use(PassSettings(True, multiple, can_fuse_prefill=False))
        check_image(runner)  # with padding, as in later prefills
    elif invariant:
        raise _refusal(loaded)
    return runner


@torch.inference_mode()
def measure_row_multiple(runner: ModelRunner) -> int | None:
    """The smallest multiple in `MULTIPLES` whose row counts all give the same bits; None if there is none.

    It is measured with the passes of invariant numerics: chains of many lengths, and a branching tree.
    """
    loaded = runner.loaded
    if loaded.mixes_rows or loaded.recurrent or not loaded.attends_trees or loaded.device.type != "cpu":
        return None
    room = runner.max_length - 1
    fitting = sorted({(min(prefix, room - rows), rows) for prefix, rows in _PASSES if rows < room})
    if not fitting:
        return None
    tokens = _random_tokens(loaded, max(p + r for p, r in fitting))
    slot = runner.cache.allocate()
    try:
        every = (PassSettings(True, multiple) for multiple in MULTIPLES)
        return next((how.row_multiple for how in every if _holds(runner, slot, tokens, fitting, how)), None)
    finally:
        runner.cache.release(slot)


def _holds(runner: ModelRunner, slot: int, tokens: list[int], passes: list[tuple[int, int]], how: PassSettings) -> bool:
    """Whether rows keep their bits after each prefix, for all tested row counts and tree shapes."""
    multiple, unpadded = how.row_multiple, replace(how, row_multiple=1)
    some = {multiple, 2 * multiple, 3 * multiple, 4 * multiple, 8, 16, 24, 48, 64}
    for prefix, rows in passes:
        runner.cache.truncate(slot, 0)
        runner.extend_cache(slot, tokens[:prefix])
        chain = tokens[prefix : prefix + rows]
        full = _chain_logits(runner, [slot], chain, unpadded)
        counts = sorted(some & set(range(multiple, len(chain), multiple)))
        if not all(torch.equal(_chain_logits(runner, [slot], chain[:n], unpadded), full[:n]) for n in counts):
            return False
        pairs = _paths(runner, slot, chain[: len(_PARENTS)], how)
        if not all(torch.equal(got, want) for got, want in pairs):
            return False
    return True


def _random_tokens(loaded: LoadedModel, count: int) -> list[int]:
    return torch.randint(loaded.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def _chain_logits(runner: ModelRunner, slots: list[int], chain: list[int], how: PassSettings) -> Tensor:
    """Logits [N, V] of a chain in the first row of a batch of the same chain."""
    return runner.forward(slots, TokenTree.chain([chain] * len(slots), runner.loaded.device), settings=how)[0]


def _paths(runner: ModelRunner, slot: int, tokens: list[int], how: PassSettings) -> list[tuple[Tensor, Tensor]]:
    """For each path of a tree, the logits of the path on its own and those of its nodes in the tree."""
    tree = TokenTree.from_lists([tokens], [list(_PARENTS)], runner.loaded.device)
    rows = runner.forward([slot], tree, settings=how)[0]
    return [(_chain_logits(runner, [slot], [tokens[i] for i in path], how), rows[path]) for path in tree.rows[0].paths]


def _refusal(loaded: LoadedModel) -> NumericsError:
    """The error that explains why `numerics="invariant"` is impossible."""
    fix = 'use numerics="fast"; `paceline check` reports the rounding ties that remain'
    is_known = is_described(loaded.model.config.get_text_config())
    if loaded.mixes_rows:
        why = "experts, or outliers of LLM.int8, make a row depend on the other rows of its pass"
    elif is_known and loaded.device.type == "cuda" and kernels.kernels_for(loaded.device) is None:
        why = f"there is no Triton here for Paceline's kernels, so torch runs the model, and {_ON_GPU}"
        fix = f"install triton, which comes with torch for CUDA, or {fix}"
    elif loaded.recurrent:
        why = "torch computes its recurrent layers, several tokens at once where it can"
    elif not loaded.attends_trees:
        why = "this architecture does not call custom attention functions"
    elif loaded.device.type != "cpu":
        why = f"Paceline's kernels do not run its layers, so torch does, and {_ON_GPU}"
    else:
        why = f"rows differ between row counts that are multiples of {max(MULTIPLES)}, or between a tree and its paths"
    return NumericsError('numerics="invariant" is not possible for this model on this device', got=why, fix=fix)
