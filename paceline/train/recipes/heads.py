"""Training of parallel heads: each head learns one label, all from the same state.

    column     t          t+1         t+2        t+3
    token      x_t        x_{t+1}     x_{t+2}    x_{t+3}
    state      f_t        f_{t+1}     f_{t+2}
    head 0 reads f_t      label x_{t+2}, or the target's law of it: its output rows on f_{t+1}
    head 1 reads f_t      label x_{t+3}, or the target's law of it: its output rows on f_{t+2}
    head i reads f_t      label x_{t+2+i}                                              f_{t+1+i}

Example: tokens [A, B, C, D], the answer being C and D: head 0 has the lessons f_0 -> C and f_1 -> D, head 1 f_0 -> D.

The output layer is most of the cost, so only columns with a lesson go through it.
"""

from typing import final

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...heads import BlockwiseHead, MedusaHead
from ...heads.parts import draft_index
from ..losses import Loss
from ..recipe import Batch, Losses, Recipe
from .shared import Teacher, shifted


class Lessons:
    """Labels of a batch: the token `ahead` columns after each one, where the target wrote it and the head can draft it.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. states: the target's last [B, T, E]. index: of
    each target token in the draft vocabulary, -1: none. loss: between laws; None: cross entropy with the token itself.
    """

    def __init__(self, batch: Batch, states: Tensor, lm_head: Tensor, index: Tensor, loss: Loss | None):
        self._batch, self._index, self._loss = batch, index, loss
        self._teacher = None if loss is None else Teacher(states, shifted(batch.is_answer, 1), lm_head)

    def columns(self, ahead: int) -> Tensor:
        """Columns that have such a lesson. [B, T]."""
        label = self._index[shifted(self._batch.token_ids, ahead)]
        return shifted(self._batch.is_answer, ahead) & (label >= 0)

    def loss(self, logits: Tensor, columns: Tensor, ahead: int) -> Tensor:
        """Mean loss of logits [M, Vd], those of the columns; zero where there are none."""
        if not len(logits):
            return logits.sum()
        if self._loss is None or self._teacher is None:
            return nn.functional.cross_entropy(logits, self._labels(columns, ahead))
        return self._loss(self._teacher.logits(columns, ahead - 1), logits)

    def agreement(self, logits: Tensor, columns: Tensor, ahead: int) -> Tensor:
        """Share of answer tokens whose likeliest draft is right; tokens that cannot be drafted are wrong."""
        right = (logits.detach().argmax(-1) == self._labels(columns, ahead)).sum()
        return right / shifted(self._batch.is_answer, ahead).sum().clamp_min(1)

    def _labels(self, columns: Tensor, ahead: int) -> Tensor:
        return self._index[shifted(self._batch.token_ids, ahead)[columns]]


@final
class HeadsRecipe(Recipe):
    """Train Medusa or blockwise heads that are attached to their target.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. loss: between the target's law and a head's, see
    `losses`; None: cross entropy with the token that followed. decay: head i weighs decay^i (Medusa: 0.8; blockwise: 1,
    the mean). one_head: train one head a batch, drawn uniformly, as Stern et al. do to save memory; the agreement of
    the others is then NaN. In evaluation mode all heads are measured. Raises `ConfigError`.
    """

    def __init__(
        self,
        module: MedusaHead | BlockwiseHead,
        lm_head: Tensor,
        loss: Loss | None = None,
        decay: float = 0.8,
        one_head: bool = False,
    ):
        if not 0 < decay <= 1:
            raise ConfigError("decay is out of range", got=decay, expected="above 0 and at most 1")
        self.module = self._head = module
        self.states = module.config.states
        self.decay, self.one_head = decay, one_head
        self._rows, self._loss = lm_head, loss
        self._index = draft_index(module.draft_ids.to(lm_head.device), module.config.vocab_size)

    def loss(self, batch: Batch) -> Losses:
        """Mean of the heads' losses, weighted."""
        head, states = self._head, batch.states[self.states[0]]
        lessons = Lessons(batch, states, self._rows, self._index, self._loss)
        trained = range(head.num_heads)
        if self.one_head and head.training:
            drawn = int(torch.randint(head.num_heads, ()))
            trained = range(drawn, drawn + 1)
        total, weight, parts = states.new_zeros(()), 0.0, dict[str, Tensor]()
        agreement = [states.new_full((), float("nan")) for _ in range(head.num_heads)]
        for i in trained:
            columns = lessons.columns(2 + i)
            logits = head.logits(head.hidden(states[columns], i), i)  # [M, Vd]
            value = lessons.loss(logits, columns, 2 + i)
            total, weight = total + self.decay**i * value, weight + self.decay**i
            parts[f"law{i}"] = value.detach()
            agreement[i] = lessons.agreement(logits, columns, 2 + i).to(states.dtype)
        return Losses(total / weight, parts, torch.stack(agreement))
