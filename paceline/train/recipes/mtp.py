"""Training of MTP modules: every step as drafting will run it (see `heads.mtp`), the true tokens before being fed.

Step s at t reads h^s_t (f_t for s = 0) and x_{t+1+s}; it learns x_{t+2+s}, or the target's distribution of it: its
output rows on f_{t+1+s}.

While s < K, step s is module s + 1, causal over its own rows. Beyond, the last module continues, at t + s - K + 1: it
sees its own rows up to t, and on top of them the rows of these further steps at t.
"""

from typing import ClassVar, final

import torch
from torch import Tensor

from ...errors import ConfigError
from ...heads.mtp import MtpConfig
from ...heads.parts import attend_causally
from ...schema import checked
from ..config import AtLeast1, Few, Seed
from ..recipe import Batch, Losses, Plan
from .common import Decay, HeadRecipe, TokenLoss, Unrolled, head_sizes, layer_sizes, shifted


@checked
class MtpShape:
    """Shape of MTP modules; None: the target's."""

    draft_vocab_size: AtLeast1 = 8192
    num_modules: Few = 1
    intermediate_size: AtLeast1 | None = None
    seed: Seed = 0


@checked
class MtpLoss:
    """How MTP modules are trained.

    steps: drafting steps unrolled, None: one a module; more let the last module continue (FastMTP, arXiv 2509.18362).
    decay: step s weighs decay^s (FastMTP: 0.6; DeepSeek-V3: 1, the mean).
    """

    name: TokenLoss = "ce"
    steps: Few | None = 3
    decay: Decay = 0.6


@final
class MtpRecipe(HeadRecipe):
    """Train MTP modules that are attached to their target."""

    KINDS: ClassVar = {"mtp": (MtpShape, MtpLoss)}

    @classmethod
    def configure(cls, plan: Plan) -> MtpConfig:
        return MtpConfig(**head_sizes(plan), **layer_sizes(plan), num_modules=plan.shape.num_modules)

    @classmethod
    def check_loss(cls, config: MtpConfig, settings: MtpLoss) -> None:
        if settings.steps is not None and settings.steps < config.num_modules:
            expected = f"at least head.num_modules, {config.num_modules}"
            raise ConfigError("train.loss.steps is too small", got=settings.steps, expected=expected)

    def loss(self, batch: Batch) -> Losses:
        head, hidden, decay = self.head, batch.states[self._last], self.settings.decay
        steps = self.settings.steps or head.config.num_modules
        labels = self.labels(batch)
        length, last = batch.token_ids.shape[1], head.config.num_modules - 1
        text_columns = torch.arange(length, device=hidden.device).expand_as(batch.token_ids)
        unrolled = Unrolled(length, hidden.device)
        total, parts, agreement = hidden.new_zeros(()), dict[str, Tensor](), list[Tensor]()
        for step in range(steps):
            tokens = shifted(batch.token_ids, 1 + step)
            positions = text_columns + max(0, step - last)
            hidden = head(step, tokens, hidden, positions, attend_causally if step < last else unrolled)
            columns = labels.columns(2 + step)
            value, right = labels.compare(head.logits(hidden[columns], step), columns, 2 + step)
            total = total + decay**step * value
            parts[f"loss{step}"] = value.detach()
            agreement.append(right)
        weight = sum(decay**step for step in range(steps))
        return Losses(total / weight, parts, torch.stack(agreement))
