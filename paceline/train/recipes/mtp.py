"""Training of MTP modules: every step as drafting will run it, the tokens before fed as they truly were.

    column            t          t+1         t+2        t+3
    token             x_t        x_{t+1}     x_{t+2}    x_{t+3}
    state             f_t        f_{t+1}     f_{t+2}
    step 0 at t       reads f_t and x_{t+1}             label: x_{t+2}, or its distribution: output rows on f_{t+1}
    step 1 at t       reads h^1_t and x_{t+2}           label: x_{t+3}
    step s at t       reads h^s_t and x_{t+1+s}         label: x_{t+2+s}

While s < K, step s is module s + 1, causal over its own rows. Beyond, the last module continues, at t + s - K + 1: it
sees its own rows up to t, and on top of them the rows of these further steps at t.
"""

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...heads.mtp import MtpConfig, MtpHead
from ...runner import LoadedModel
from ...schema import checked
from ..config import Few, Seed, Size
from ..losses import Loss
from ..recipe import Batch, Losses
from .common import Decay, HeadRecipe, Labels, LayerShape, TokenLoss, Unrolled, check_decay, loss_or_token, shifted


@checked
class MtpShape:
    """Shape of MTP modules; None: the target's."""

    draft_vocab_size: Size = 8192
    num_modules: Few = 1
    intermediate_size: Size | None = None
    seed: Seed = 0


@checked
class MtpLoss:
    """See `MtpRecipe`. name: "token", or one of `losses`. steps: three, of which a lone module does all (FastMTP)."""

    name: TokenLoss = "ce"
    steps: Few | None = 3
    decay: Decay = 0.6


@final
class MtpRecipe(HeadRecipe):
    """Train MTP modules that are attached to their target.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. loss: between the target's distribution and a
    step's, see `losses`; None: cross entropy with the token that followed. steps: drafting steps unrolled, None: one a
    module; more let the last module go on (FastMTP, arXiv 2509.18362). decay: step s weighs decay^s (FastMTP: 0.6;
    DeepSeek-V3: 1, the mean). Raises `ConfigError`.
    """

    KINDS: ClassVar = {"mtp": (MtpHead, MtpShape, MtpLoss)}

    def __init__(
        self, module: MtpHead, lm_head: Tensor, loss: Loss | None = None, steps: int | None = None, decay: float = 0.6
    ):
        check_decay(decay)
        _check_steps(module.config, steps)
        super().__init__(module, lm_head, loss)
        self.steps, self.decay = steps or module.config.num_modules, decay

    @classmethod
    def configure(cls, method: str, shape: MtpShape, target: LoadedModel) -> MtpConfig:
        """The modules' configuration."""
        like = LayerShape(target)
        return MtpConfig(
            hidden_size=target.hidden_size,
            intermediate_size=shape.intermediate_size or like.intermediate_size,
            num_attention_heads=like.heads,
            num_key_value_heads=like.kv_heads,
            head_dim=like.head_dim,
            states=(target.num_layers,),
            draft_vocab_size=min(shape.draft_vocab_size, target.vocab_size),
            vocab_size=target.vocab_size,
            num_modules=shape.num_modules,
            rms_norm_eps=like.rms_norm_eps,
            rope_theta=like.rope_theta,
        )

    @classmethod
    def options(cls, method: str, loss: MtpLoss, target: LoadedModel) -> dict[str, Any]:
        """As the configuration says."""
        return {"loss": loss_or_token(loss.name), "steps": loss.steps, "decay": loss.decay}

    @classmethod
    def check_fresh(cls, config: MtpConfig, loss: MtpLoss) -> None:
        """Every module needs a step."""
        _check_steps(config, loss.steps)

    def loss(self, batch: Batch) -> Losses:
        """Mean of the steps' losses, weighted."""
        head, hidden = self.head, batch.states[self.states[0]]
        labels = Labels(batch, hidden, self._rows, self._index, self._loss)
        length, last = batch.token_ids.shape[1], head.config.num_modules - 1
        text_columns = torch.arange(length, device=hidden.device).expand_as(batch.token_ids)
        unrolled = Unrolled(length, hidden.device)
        total, parts, agreement = hidden.new_zeros(()), dict[str, Tensor](), list[Tensor]()
        for step in range(self.steps):
            tokens = shifted(batch.token_ids, 1 + step)
            positions = text_columns + max(0, step - last)
            hidden = head(step, tokens, hidden, positions, _causal if step < last else unrolled)
            columns = labels.columns(2 + step)
            logits = head.logits(hidden[columns], step)  # [M, Vd]
            value = labels.loss(logits, columns, 2 + step)
            total = total + self.decay**step * value
            parts[f"loss{step}"] = value.detach()
            agreement.append(labels.agreement(logits, columns, 2 + step).to(hidden.dtype))
        weight = sum(self.decay**step for step in range(self.steps))
        return Losses(total / weight, parts, torch.stack(agreement))


def _check_steps(config: MtpConfig, steps: int | None) -> None:
    if steps is not None and steps < config.num_modules:
        expected = f"at least head.num_modules, {config.num_modules}"
        raise ConfigError("train.loss.steps is too small", got=steps, expected=expected)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
