"""An independent reference for answers, and how far rounding alone changes its scores.

    reference   [prompt a b c]      the whole text in one pass, see `target.prefill.reference_logits`
    noise       [prompt a b c]'     the same, with the last bit of every input of the first layer changed

Such a pass has no cache, tree, commit or padding, so no fault in them can affect it or increase the noise. It shares
the weights, kernels and layers, which `target.self_test` compares with plain transformers.

The scores of correct engines differ from the reference by 0.7 to 1.4 times the noise (SmolLM2 in bfloat16 and float32,
tiny models of all architectures). With fast numerics a fault that changes scores by less than twice the noise is only
found where it changes a token with a wider gap; to find more, check in float32 or with invariant numerics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.request import TokenLogprob, TokenSequence
from ..core.rng import Purpose, gumbel
from ..core.tree import TokenTree
from ..sampling.distribution import target_distribution
from ..target import LoadedModel
from ..target.prefill import encode_images, reference_logits

NUM_TOP = 20
"""The most likely tokens of a position, whose scores are compared."""
_DITHERS = (1, 2)
_MOST_ROWS = 64
"""Positions that are compared, the last ones: the logits of a long answer would fill the memory."""
TIE = 4.0
"""Gaps that rounding can close, in units of the noise of one score."""
TYPICAL, WORST = 2.0, 4.0
"""Deviations that rounding explains, see `Deviation`; correct engines reached up to 1.4 and 2.4."""


@dataclass(frozen=True)
class Deviation:
    """The distance of an answer's scores from the reference's, in units of the noise.

    typical: root mean square over the positions; about 1 where only rounding differs. worst: of one position, in units
    of the noise where that is largest. regret: the most by which the reference prefers another token to the one that
    was taken, in units of the noise there. typical and worst are None for an answer without log-probabilities.
    """

    typical: float | None
    worst: float | None
    regret: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it; a NaN is not explained."""
        pairs = ((self.typical, TYPICAL), (self.worst, WORST), (self.regret, TIE))
        return all(value is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True)
class Measured:
    """Two answers compared with the reference, up to their first difference.

    noise: how far rounding moves a score at the last position (root mean square), measured between passes of the
    reference alone. gap: reference score of the plain token less that of the speculative one where the answers part,
    None where they do not. Both are in the scores that decide: log-scores, divided by the temperature if sampled.
    """

    noise: float
    gap: float | None
    plain: Deviation
    speculative: Deviation


@dataclass(frozen=True)
class Decoded:
    """One side's answer. logprobs: with the `NUM_TOP` most likely tokens of each position; None: not reported."""

    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Sequence[TokenLogprob] | None = None


@torch.inference_mode()
def measure_scores(
    loaded: LoadedModel, seq: TokenSequence, plain: Decoded, speculative: Decoded, count: int
) -> Measured:
    """Compare the first `count` tokens of two answers to the prompt of `seq` with the reference.

    All but the last of these tokens are the same on both sides. count: at least 1.
    """
    text, rows = [*seq.prompt_ids, *plain.token_ids[: count - 1]], min(count, _MOST_ROWS)
    features = encode_images(loaded, seq.vision)
    dithers = (None, *_DITHERS)
    logits, *moved = [reference_logits(loaded, text, rows, seq.vision, features, dither) for dither in dithers]
    exact = _log_softmax(logits)
    best = exact.topk(min(NUM_TOP, exact.shape[-1])).indices
    noise = _rms(torch.stack([(_log_softmax(shifted) - exact).gather(-1, best) for shifted in moved], -1).flatten(1))
    # Not what came out small by chance, nor below the float32 of reported log-probabilities (float64 models).
    resolution = torch.finfo(exact.dtype).eps / 4 * float(_rms(exact.gather(-1, best)).max())
    noise = noise.clamp(min=max(float(_rms(noise)), resolution, 1e-30))
    first = count - rows
    scores = [
        _decision_scores(row, replace(seq, token_ids=text[: len(seq.prompt_ids) + first + index], slot=-1))
        for index, row in enumerate(logits)
    ]
    unit = noise.double() / (seq.params.temperature or 1.0)  # [rows], of the scores that decide

    def deviation(answer: Decoded) -> Deviation:
        taken = answer.token_ids[first:count]
        regrets = [(row.max() - row[token]) / scale for row, token, scale in zip(scores, taken, unit, strict=True)]
        regret = float(torch.stack(regrets).max())
        if answer.logprobs is None:
            return Deviation(None, None, regret)
        reported = answer.logprobs[first:count]
        apart = [
            row.new_tensor(list(logprob.top.values())) - row[list(logprob.top)]
            for logprob, row in zip(reported, exact, strict=True)
        ]
        off = torch.stack(list(map(_rms, apart)))
        return Deviation(float(_rms(off) / _rms(noise)), float(off.max() / noise.max()), regret)

    plain_token, speculative_token = plain.token_ids[count - 1], speculative.token_ids[count - 1]
    gap = None if plain_token == speculative_token else float(scores[-1][plain_token] - scores[-1][speculative_token])
    return Measured(float(unit[-1]), gap, deviation(plain), deviation(speculative))


def _log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities as they are reported (`token_logprob`)."""
    return torch.log_softmax(logits.float(), -1)


def _rms(values: Tensor) -> Tensor:
    """Root mean square over the last dimension."""
    return values.square().mean(-1).sqrt()


def _decision_scores(logits: Tensor, seq: TokenSequence) -> Tensor:
    """What the argmax is taken of: processed log-scores, plus the shared noise of this position if sampled. [V]."""
    tree = TokenTree.chain([[seq.token_ids[-1]]], logits.device)
    scores = target_distribution(logits[None, None], [seq], tree).at([0], [0])[0].double()
    if seq.params.temperature == 0:
        return scores
    seed = torch.tensor([seq.seed], device=logits.device)
    position = torch.tensor([[len(seq.token_ids)]], device=logits.device)
    return scores + gumbel(seed, position, Purpose.TARGET, scores.shape[0])[0, 0]
