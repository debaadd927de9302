"""EAGLE's training: every position of an answer is a lesson, and the draft's own steps are trained as they will run.

    column            t          t+1        t+2        t+3
    token             x_t        x_{t+1}    x_{t+2}    x_{t+3}
    state             f_t        f_{t+1}    f_{t+2}
    step 0  reads     f_t and x_{t+1}      label: the law of x_{t+2}, that is head(f_{t+1}); state f_{t+1}
    step 1  reads     h_t and x_{t+2}      label: the law of x_{t+3}, head(f_{t+2})
    step s  reads     h^s and x_{t+1+s}    label: the law of x_{t+2+s}, head(f_{t+1+s})

Step s > 0 sees what drafting would leave in its cache: pairs (f, x) up to column t, and its own steps 1 to s on top:

    query of step 2 at t    keys: step 0 at columns <= t,  step 1 at t,  step 2 at t          position t + 2
"""

from typing import final

import torch
from torch import Tensor

from ...heads import EagleHead
from ..losses import Loss, regression
from ..recipe import Batch, Losses, Recipe
from .shared import Teacher, Unrolled, shifted


@final
class EagleRecipe(Recipe):
    """Train an `EagleHead` that is attached to its target.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]; of them and the last states are the labels.
    last: index of the last state. steps: drafting steps unrolled (EAGLE-1: 1, EAGLE-3: up to 7), step s weighted
    decay^s. regress: weight of EAGLE-1's SmoothL1 on the states, beside `ce_weight` times the loss of the laws.
    noise: half-width of the uniform noise on the states that step 0 reads. loss: see `losses`.
    """

    def __init__(
        self,
        module: EagleHead,
        lm_head: Tensor,
        last: int,
        loss: Loss,
        steps: int = 1,
        decay: float = 0.8,
        regress: float = 0.0,
        ce_weight: float = 1.0,
        noise: float = 0.0,
    ):
        self.module = self.head = module
        self._rows, self._last, self._loss = lm_head, last, loss
        self.steps, self.decay, self.regress, self.ce_weight, self.noise = steps, decay, regress, ce_weight, noise
        self.states = tuple(sorted({*module.config.states, last}))
        self._can_draft = torch.zeros(module.config.vocab_size, dtype=torch.bool, device=lm_head.device)
        self._can_draft[module.draft_ids.to(lm_head.device)] = True

    def loss(self, batch: Batch) -> Losses:
        """Sum over steps of decay^s times the loss of step s."""
        head = self.head
        states = torch.cat([batch.states[layer] for layer in head.config.states], -1)
        labels = batch.states[self._last]
        length = batch.token_ids.shape[1]
        if self.noise and head.training:
            states = states + (torch.rand_like(states) * 2 - 1) * self.noise
        taught = Teacher(labels, shifted(batch.is_answer, 1), self._rows)
        hidden = head.begin(states)
        unrolled = Unrolled(length, batch.token_ids.device)
        parts, agreement = dict[str, Tensor](), list[Tensor]()
        total = head.logits(hidden[:, :0]).sum()  # zero, and part of the graph where there is no lesson
        for step in range(self.steps):
            tokens = shifted(batch.token_ids, 1 + step)
            positions = (torch.arange(length, device=tokens.device) + step).expand_as(tokens)
            hidden = head(tokens, hidden, positions, unrolled)
            next_token = shifted(batch.token_ids, 2 + step)
            counts = shifted(batch.is_answer, 2 + step) & self._can_draft[next_token]
            if not bool(counts.any()):  # the answers are too short for this step
                agreement.append(labels.new_tensor(float("nan")))
                continue
            drafted = hidden[counts]
            logits = head.logits(drafted)
            law = self._loss(taught.logits(counts, 1 + step), logits)
            value = self.ce_weight * law
            if self.regress:
                apart = regression(shifted(labels, 1 + step)[counts], drafted)
                value = value + self.regress * apart
                parts[f"regress{step}"] = apart.detach()
            total = total + self.decay**step * value
            parts[f"law{step}"] = law.detach()
            agreement.append(self._agreement(batch, logits.detach(), next_token, counts, step))
        return Losses(total, parts, torch.stack(agreement))

    def _agreement(self, batch: Batch, logits: Tensor, next_token: Tensor, counts: Tensor, step: int) -> Tensor:
        """Share of all answer tokens foreseen; those outside the draft vocabulary are misses."""
        right = (self.head.draft_ids[logits.argmax(-1)] == next_token[counts]).sum()
        return right / shifted(batch.is_answer, 2 + step).sum().clamp_min(1)
