"""Measure what stood between two rival tokens: decode up to them again, the plain way and the speculative way.

    plain way         one row a pass:            [p] [t0] [t1] [t2]            scores of the token after t2
    speculative way   the rounds of the answer:  [p t0 . .] [t1 t2 .]          the same, from a pass of many rows

The drafted tokens that were rejected are not kept, so other tokens stand in for them; a row never reads them.
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
    one_row = _replay(runner, seq, [(1, 1)] * (count + 1), count)
    shapes = [(r.num_nodes + 1, r.num_emitted) for r in rounds]
    many_rows = _replay(runner, seq, shapes, count)
    oracle = _whole_text(runner, [*seq.prompt_ids, *answer[:count]])
    before = replace(seq, token_ids=[*seq.prompt_ids, *answer[:count]], slot=-1)
    scores = [_decision_scores(logits, before) for logits in (one_row, many_rows, oracle)]
    here, there, reference = scores
    noise = max(abs(float(here[t] - there[t])) for t in (plain, drafted))
    finite = here.isfinite() & reference.isfinite()
    moved = float((here - reference)[finite].abs().max())
    # A float of this size cannot be told from its neighbours, wherever the logits were rounded last.
    unit = torch.finfo(runner.loaded.dtype).eps * float(here[finite].abs().max())
    return Measured(float(here[plain] - here[drafted]), noise, _MARGIN * max(moved, unit))


def _replay(runner: ModelRunner, seq: Sequence, shapes: list[tuple[int, int]], count: int) -> Tensor:
    """Logits [V] after `count` tokens of the answer, decoded in passes of (rows, tokens emitted)."""
    answer = seq.output_ids
    slot = runner.admit(seq.prompt_ids)
    try:
        runner.prefill(slot, seq.prompt_ids[:-1])
        done = 0
        for rows, emitted in shapes:
            root = answer[done - 1] if done else seq.prompt_ids[-1]
            known = answer[done : done + rows - 1]
            chain = [root, *known, *[root] * (rows - 1 - len(known))]
            logits = runner.forward([slot], TokenTree.chain([chain], runner.loaded.device)).logits[0]
            if done + emitted > count:
                return logits[count - done]
            runner.commit([slot], [range(1, emitted)])
            done += emitted
        raise AssertionError("the rounds end before the divergence")
    finally:
        runner.cache.release(slot)


def _whole_text(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """Logits [V] of the slow obvious way: the whole text in one pass and a fresh cache."""
    loaded = runner.loaded
    cache = SlotCache(1, len(token_ids))
    layout = PassLayout(
        cache.begin([cache.allocate()], len(token_ids)), len(token_ids), None, False, device=loaded.device
    )
    return loaded.forward(torch.tensor([token_ids], device=loaded.device), layout, cache)[0, -1]


def _decision_scores(logits: Tensor, seq: Sequence) -> Tensor:
    """What the argmax is taken of: processed log-scores, plus the shared noise of this position if sampled. [V]."""
    tree = TokenTree.chain([[seq.token_ids[-1]]], logits.device)
    scores = target_law(logits[None, None], [seq], tree).scores[0, 0].double()
    if seq.params.temperature == 0:
        return scores
    seed = torch.tensor([seq.seed], device=logits.device)
    position = torch.tensor([[len(seq.token_ids)]], device=logits.device)
    return scores + gumbel(seed, position, Purpose.TARGET, scores.shape[0])[0, 0]
