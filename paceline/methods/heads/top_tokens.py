"""The most probable tokens by a head's logits, for heads that draft over a part of the vocabulary.

The target emits argmax(log p + T g), with T its temperature and g the noise of the position (rule R7), which an exact
verifier shares with its drafters. So a sampled row ranks its tokens by logits + T g, without those that its truncation
forbids: if q is close to p, this drafts exactly the target's choice, as at T = 0. The tokens are still a function of
text and seed, so the draft is a point mass.

The confidence in a token is softmax(logits + T g). It is the probability that the target chooses the token, if log p
differs from the logits by independent Gumbel noise of scale 1. If noise is not shared, the confidence is
softmax(logits / max(T, 1)): at a lower temperature the target is more certain of its token, but the head is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...core.interfaces import Target, Verifier
from ...core.request import TokenSequence
from ...core.rng import Purpose, gumbel
from ...kernels import library as native
from ...kernels.library import largest, reads
from ...sampling.scores import banned_columns, mask_banned
from ...sampling.warpers import is_truncated, warp
from ...system.hardware import one_thread
from .trees import Children, DynamicTree, grow


class Best(NamedTuple):
    """The k largest of some logits, in descending order.

    columns: int32 [..., k]. logps: their log-softmax over all logits, float32 [..., k].
    """

    columns: Tensor
    logps: Tensor


@dataclass(frozen=True, eq=False)
class TokenRanking:
    """How a head's logits [R, Vd] rank the tokens it can draft.

    draft_ids: the target's token id of each column [Vd].
    uses_noise: whether sampled rows are ranked with the noise that an exact verifier shares.
    banned: the columns of tokens that must not be drafted, see `sampling.scores`.

    Arguments of the methods:
    seqs: the sequence of each row; one sequence may have several rows.
    offset: the tokens are at position `len(seq.token_ids) + offset`.
    """

    draft_ids: Tensor
    uses_noise: bool
    banned: Tensor | None = None

    @classmethod
    def of(cls, draft_ids: Tensor, target: Target, verifier: Verifier) -> Self:
        """The ranking for a drafter that is bound to this target and verifier."""
        return cls(draft_ids, verifier.exact, banned_columns(target.banned_token_ids, draft_ids))

    def top(
        self, logits: Tensor, seqs: Sequence[TokenSequence], offset: int, count: int, known: Best | None = None
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` best tokens of each row, best first, and the logarithms of the confidence in them.

        known: the largest of the scores [R, count], if they are known (see `in_pass`).
        """
        return self._listed(self.best(logits, seqs, offset, count) if known is None else known)

    def best(self, logits: Tensor, seqs: Sequence[TokenSequence], offset: int, count: int) -> Best:
        """The `count` largest scores of each row."""
        is_native = reads(logits)
        with one_thread(logits):
            unchanged = is_native and self.banned is None and all(self._ranks_by_logits(seq) for seq in seqs)
            scores = logits.float() if unchanged else self.scores(logits, seqs, offset)
            count = min(count, scores.shape[1])
            if is_native:
                return Best(*largest(scores, count))
            best = scores.topk(count, dim=-1)
            return Best(best.indices, best.values - scores.logsumexp(-1, keepdim=True))

    def in_pass(self, seqs: Sequence[TokenSequence], offset: int, count: int) -> tuple[int, Tensor | None]:
        """How a pass over sequences [B] finds the best tokens itself: how many, and the noise [B, Vd] to add.

        0: not at all, since a score is not a logit plus noise.
        """
        sampled = [seq for seq in seqs if not self._ranks_by_logits(seq)]
        if self.banned is not None or (sampled and not self.uses_noise) or any(is_truncated(s.params) for s in sampled):
            return 0, None
        if not sampled:
            return count, None
        temperatures = torch.tensor([seq.params.temperature for seq in seqs], device=self.draft_ids.device)
        return count, _noise(self.draft_ids, seqs, offset) * temperatures[:, None]

    def grow_marginal(
        self,
        trees: Sequence[DynamicTree],
        seqs: Sequence[TokenSequence],
        logits: Sequence[Tensor] | Tensor,
        known: Best | None = None,
    ) -> None:
        """Grow trees where the distribution of a level, `logits[row][level]`, does not depend on the path.

        known: the largest of the scores [B, levels, top_k], if they are known.
        """
        listed = None if known is None else self._listed(Best(*(part.flatten(0, 1) for part in known)))

        def children(rows: list[int], level: int) -> Children:
            if listed is None:
                scores = torch.stack([logits[row][level] for row in rows])
                tokens, logps = self.top(scores, [seqs[row] for row in rows], level, trees[0].top_k)
            else:
                places = [len(listed[0]) // len(trees) * row + level for row in rows]
                tokens, logps = [listed[0][place] for place in places], [listed[1][place] for place in places]
            times = [len(trees[row].frontier) for row in rows]
            return (
                [[ids] * count for ids, count in zip(tokens, times, strict=True)],
                [[row_logps] * count for row_logps, count in zip(logps, times, strict=True)],
            )

        grow(trees, children)

    def scores(self, logits: Tensor, seqs: Sequence[TokenSequence], offset: int) -> Tensor:
        """The scores [R, Vd] that rank tokens, and whose softmax is the confidence in them; float32.

        Tokens whose logit is not finite are not drafted.
        """
        lowest = torch.finfo(torch.float32).min / 4  # finite, so that a row without finite logits has a softmax
        scores = mask_banned(logits.float().nan_to_num(lowest, lowest, lowest), self.banned)
        sampled = [row for row, seq in enumerate(seqs) if seq.params.temperature != 0]
        if sampled:
            rows, chosen = torch.tensor(sampled, device=logits.device), [seqs[row] for row in sampled]
            old = scores if len(chosen) == len(scores) else scores.index_select(0, rows)
            if self.uses_noise:
                temperatures = torch.tensor([seq.params.temperature for seq in chosen], device=scores.device)[:, None]
                new = old.addcmul(temperatures, _noise(self.draft_ids, chosen, offset))
                if any(is_truncated(seq.params) for seq in chosen):
                    forbidden = warp(old, [seq.params for seq in chosen]).isneginf()
                    new = new.masked_fill(forbidden, -torch.inf)
            else:
                new = old / self.divisors(chosen).to(scores.device)
            scores = new if old is scores else scores.index_copy(0, rows, new)
        return scores

    def _listed(self, best: Best) -> tuple[list[list[int]], list[list[float]]]:
        ids = self._listed_draft_ids
        return [[ids[column] for column in row] for row in best.columns.tolist()], best.logps.tolist()

    @cached_property
    def _listed_draft_ids(self) -> list[int]:
        return self.draft_ids.tolist()

    def divisors(self, seqs: Sequence[TokenSequence]) -> Tensor:
        """The numbers by which `scores` divides the logits of each row. [R, 1]."""
        return torch.tensor([1.0 if self.uses_noise else max(1.0, seq.params.temperature) for seq in seqs])[:, None]

    def _ranks_by_logits(self, seq: TokenSequence) -> bool:
        """Whether `scores` leaves the finite logits of this row unchanged."""
        return seq.params.temperature == 0 or (not self.uses_noise and seq.params.temperature <= 1)


def _noise(draft_ids: Tensor, seqs: Sequence[TokenSequence], offset: int) -> Tensor:
    """The target's noise at this position, computed once for each sequence. [R, Vd]."""
    distinct = list({id(seq): seq for seq in seqs}.values())
    seeds, positions = [seq.seed for seq in distinct], [len(seq.token_ids) + offset for seq in distinct]
    if draft_ids.device.type == "cpu" and native.library() is not None:
        noise = native.gumbel(seeds, positions, Purpose.TARGET, draft_ids)
    else:
        keys = torch.tensor([seeds, positions], device=draft_ids.device)
        noise = gumbel(keys[0], keys[1, :, None], Purpose.TARGET, draft_ids).squeeze(1)
    if len(distinct) in (1, len(seqs)):
        return noise.expand(len(seqs), -1)
    place = {id(seq): row for row, seq in enumerate(distinct)}
    return noise.index_select(0, torch.tensor([place[id(seq)] for seq in seqs], device=noise.device))
