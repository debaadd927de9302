"""Measure what stood between two rival tokens: decode up to them again, the plain way and the speculative way.

    plain way         one row a pass:            [p] [t0] [t1] [t2]            scores of the token after t2
    speculative way   the trees of the answer:   p ── t0 ── t1    t1 ── x      the same, from a pass of many rows
                                                  └── x           └── t2

Each round is judged on the very tree it had, rejected branches included, and in the pass that read the prompt's end if
that was its own. Only probes are missing, which are not kept.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from ..core.outputs import Round
from ..core.request import Sequence
from ..core.rng import Purpose, gumbel
from ..core.tree import TokenTree
from ..llm import LLM
from ..runner import ModelRunner, SlotCache
from ..runner.layout import PassLayout
from ..runner.one_pass import read_and_verify
from ..sampling import target_law
from .verdict import Divergence, Measured

_MARGIN = 4.0
"""How much further than measured once, over the whole vocabulary, rounding may move a score elsewhere."""


@torch.inference_mode()
def measure(llm: LLM, seq: Sequence, rounds: Seq[Round], divergence: Divergence) -> Measured:
    """Measure a divergence of the speculative answer `seq`, whose rounds are given; both sides have a token there."""
    plain, drafted = divergence.plain_token, divergence.speculative_token
    assert plain is not None
    assert drafted is not None
    count, answer = divergence.position, seq.output_ids
    runner = llm.runner
    one_row = _replay(runner, seq, _plain_rounds(seq, count), count)
    many_rows = _replay(runner, seq, rounds, count)
    oracle = _whole_text(runner, seq, count)
    before = replace(seq, token_ids=[*seq.prompt_ids, *answer[:count]], slot=-1)
    scores = [_decision_scores(logits, before) for logits in (one_row, many_rows, oracle)]
    here, there, reference = scores
    noise = max(abs(float(here[t] - there[t])) for t in (plain, drafted))
    finite = here.isfinite() & reference.isfinite()
    moved = float((here - reference)[finite].abs().max())
    # A float of this size cannot be told from its neighbours, wherever the logits were rounded last.
    unit = torch.finfo(runner.loaded.dtype).eps * float(here[finite].abs().max())
    return Measured(float(here[plain] - here[drafted]), noise, _MARGIN * max(moved, unit))


def _plain_rounds(seq: Sequence, count: int) -> list[Round]:
    """`count` tokens of the answer and one more, a round for each."""
    roots = [seq.prompt_ids[-1], *seq.output_ids[:count]]
    return [Round("", 0, 0, 1, token_ids=(root,)) for root in roots]


def _replay(runner: ModelRunner, seq: Sequence, rounds: Seq[Round], count: int) -> Tensor:
    """Logits [V] after `count` tokens of the answer, decoded in these rounds."""
    slot = runner.admit(seq.prompt_ids, seq.vision)
    try:
        runner.read(slot, seq.prompt_ids, seq.vision, leave=any(one.with_prompt for one in rounds))
        done = 0
        for one in rounds:
            tree = TokenTree.from_lists([one.token_ids], [one.parents], runner.loaded.device)
            if one.with_prompt:
                logits = read_and_verify(runner, slot, seq.prompt_ids[runner.cache.lengths[slot] : -1], tree)[0]
            else:
                logits = runner.forward([slot], tree).logits[0]
            if done + one.num_emitted > count:
                return logits[(0, *one.path)[count - done]]
            runner.commit([slot], [one.path[: one.num_emitted - 1]])
            done += one.num_emitted
        raise AssertionError("the rounds end before the divergence")
    finally:
        runner.cache.release(slot)


def _whole_text(runner: ModelRunner, seq: Sequence, count: int) -> Tensor:
    """Logits [V] after `count` tokens of the answer, the slow obvious way: the whole text in one pass, a fresh cache.

    With pictures: the answer read as if it were part of the prompt.
    """
    loaded, token_ids = runner.loaded, [*seq.prompt_ids, *seq.output_ids[:count]]
    if seq.vision is not None:
        slot = runner.admit(token_ids, seq.vision)
        try:
            runner.read(slot, token_ids, seq.vision)
            return runner.forward([slot], TokenTree.chain([token_ids[-1:]], loaded.device)).logits[0, 0]
        finally:
            runner.cache.release(slot)
    cache = SlotCache(1, len(token_ids))
    layout = PassLayout(
        cache.begin([cache.allocate()], len(token_ids)), len(token_ids), None, False, device=loaded.device
    )
    return loaded.forward(torch.tensor([token_ids], device=loaded.device), layout, cache)[0, -1]


def _decision_scores(logits: Tensor, seq: Sequence) -> Tensor:
    """What the argmax is taken of: processed log-scores, plus the shared noise of this position if sampled. [V]."""
    tree = TokenTree.chain([[seq.token_ids[-1]]], logits.device)
    scores = target_law(logits[None, None], [seq], tree).at([0], [0])[0].double()
    if seq.params.temperature == 0:
        return scores
    seed = torch.tensor([seq.seed], device=logits.device)
    position = torch.tensor([[len(seq.token_ids)]], device=logits.device)
    return scores + gumbel(seed, position, Purpose.TARGET, scores.shape[0])[0, 0]
