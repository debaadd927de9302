"""Training of EAGLE and MTP heads: every position of an answer is supervised, and drafting steps run as they will.

    column            t          t+1        t+2        t+3
    token             x_t        x_{t+1}    x_{t+2}    x_{t+3}
    state             f_t        f_{t+1}    f_{t+2}
    step 0  reads     f_t and x_{t+1}      label: the distribution of x_{t+2}, that is head(f_{t+1}); state f_{t+1}
    step 1  reads     h_t and x_{t+2}      label: the distribution of x_{t+3}, head(f_{t+2})
    step s  reads     h^s and x_{t+1+s}    label: the distribution of x_{t+2+s}, head(f_{t+1+s})

Step s > 0 sees what the cache holds while drafting: pairs (f, x) up to column t, and its own steps 1 to s on top:

    query of step 2 at t    keys: step 0 at columns <= t,  step 1 at t,  step 2 at t          position t + 2

P-EAGLE's steps s > 0 read its `mask_hidden` and its mask token instead, with the same keys.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ...target import LoadedModel
from ...train.config import AtLeast0, AtLeast1, Few
from ...train.data import Answers
from ...train.head_recipe import (
    Decay,
    HeadRecipe,
    LayersShape,
    TokenLoss,
    Unrolled,
    config_of,
    mask_token,
    shifted,
    state_samples,
)
from ...train.recipe import Batch, Losses, Plan
from .head import EagleConfig


@checked
class EagleShape(LayersShape):
    """Shape of an EAGLE or MTP head.

    states: of EAGLE-3, empty: a low, a middle and a high one. fc_norm, norm_output: both true for EAGLE-3.1. window: of
    `EagleConfig`; no head was found to draft better with more (docs/log/2026-11-results.md).
    """

    num_hidden_layers: Few = 1
    own_lm_head: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: AtLeast1 | None = 16


@checked
class PEagleShape(EagleShape):
    """Shape of a P-EAGLE head. num_speculative_tokens: drafted in a pass. mask_token_id: None: the padding token, or
    else the end of text.
    """

    num_speculative_tokens: Few = 4
    mask_token_id: Annotated[int, Field(ge=0)] | None = None


@checked
class EagleLoss:
    """How a head is trained; None: as in its paper, with five steps for EAGLE-3, and all that P-EAGLE drafts.

    name: see `losses` and `TokenLoss`. steps: drafting steps unrolled (EAGLE-1: 1, EAGLE-3: up to 7, MTP: 3 as in
    FastMTP), step s weighted decay^s (FastMTP: 0.6). regress: the weight of EAGLE-1's SmoothL1 on the states, beside
    `ce_weight` times the loss of the distributions. noise: the half-width of the uniform noise on the states that step
    0 reads.
    """

    name: TokenLoss = "ce"
    steps: Few | None = None
    decay: Decay = 0.8
    regress: AtLeast0 | None = None
    ce_weight: AtLeast0 | None = None
    noise: AtLeast0 | None = None

    def complete(self, config: EagleConfig) -> "EagleLoss":
        """The same settings with the values of the method's paper in place of None."""
        values = {"steps": 5, "regress": 0.0, "ce_weight": 1.0, "noise": 0.0}
        if config.mask_token_id is not None:
            values["steps"] = config.num_speculative_tokens or 1
        if config.version == 1:
            values = {"steps": 1, "regress": 1.0, "ce_weight": 0.1, "noise": 0.1}
        if config.version == "mtp":
            values["steps"] = 3
        return replace(self, **{key: value for key, value in values.items() if getattr(self, key) is None})


@final
class EagleRecipe(HeadRecipe):
    """Train an `EagleHead` that is attached to its target."""

    KINDS: ClassVar = {
        "eagle": (EagleShape, EagleLoss),
        "mtp": (EagleShape, EagleLoss),
        "eagle3": (EagleShape, EagleLoss),
        "peagle": (PEagleShape, EagleLoss),
    }
    STARTS: ClassVar = {"peagle": {"eagle3": ("mask_token_id", "num_speculative_tokens")}}

    @classmethod
    def configure(cls, plan: Plan) -> EagleConfig:
        method, shape, target, layers = plan.method, plan.shape, plan.target, plan.target.num_layers
        version = {"eagle": 1, "mtp": "mtp"}.get(method, 3)
        if version != 3 and shape.states:
            got = f"head.states={list(shape.states)}"
            raise ConfigError(f"{method} heads read the last state alone", got=got, fix="eagle3")
        values: dict[str, Any] = {"version": version, "target_hidden_size": target.hidden_size}
        if version == 3:
            values["states"] = min(2, layers // 3), layers // 2, max(layers - 3, layers // 2 + 1)
        if isinstance(shape, PEagleShape):
            values["mask_token_id"] = mask_token(plan)
        return config_of(EagleConfig, plan, **values)

    @classmethod
    def check_loss(cls, config: EagleConfig, settings: EagleLoss) -> None:
        chosen = settings.complete(config)
        if not chosen.regress and not chosen.ce_weight:
            raise ConfigError("train.loss.regress and train.loss.ce_weight are 0", expected="one above 0")

    @torch.no_grad()
    def initialise(self, target: LoadedModel, answers: Answers, is_fresh: bool) -> None:
        """A fresh head takes the target's final norm, which its output rows fit, and the columns of `fc` are scaled.

        Its inputs differ in size by far (the states of SmolLM2-135M have channels of 300 beside others of 5, and
        embeddings of 0.1), so each comes in with mean square 1. A new `mask_hidden` begins as the mean of the states.
        """
        head = self.head
        if head.config.version == "mtp":  # it norms what it reads
            return
        norm: Any = getattr(target.model.base_model, "norm", None)
        if is_fresh and head.config.version == 3 and isinstance(norm, nn.Module):
            head.norm.weight.copy_(norm.weight)
        states = state_samples(target, answers, head.config.states)
        if head.config.mask_token_id is not None and not head.mask_hidden.any():
            head.mask_hidden.copy_(states.mean(0))
        parts = [head.normed(states)]
        if head.config.version == 1:
            parts.insert(0, target.embeddings[head.draft_ids.to(target.device)].float())
        self.scale_inputs(head.fc.weight, parts, is_fresh)

    def loss(self, batch: Batch) -> Losses:
        """Sum over steps of decay^s times the loss of step s."""
        head, length = self.head, batch.token_ids.shape[1]
        how: Any = self.settings.complete(head.config)
        mask = head.config.mask_token_id
        states = torch.cat([batch.states[layer] for layer in head.config.states], -1)
        last = batch.states[self._last]
        if how.noise and head.training:
            states = states + (torch.rand_like(states) * 2 - 1) * how.noise
        labels = self.labels(batch)
        hidden, unrolled = head.begin(states), Unrolled(length, states.device, head.config.num_hidden_layers)
        parts, agreement = dict[str, Tensor](), list[Tensor]()
        total = head.logits(hidden[:, :0]).sum()  # zero, and part of the graph where nothing is supervised
        for step in range(how.steps):
            tokens = shifted(batch.token_ids, 1 + step)
            positions = (torch.arange(length, device=tokens.device) + step).expand_as(tokens)
            if step and mask is not None:
                tokens, hidden = torch.full_like(tokens, mask), head.begin(head.mask_hidden).expand_as(hidden)
            hidden = head(tokens, hidden, positions, unrolled)
            columns = labels.columns(2 + step)
            drafted = hidden[columns]
            distance, right = labels.compare(head.logits(drafted), columns, 2 + step)
            agreement.append(right)
            if not len(drafted):  # the answers are too short for this step
                continue
            value = how.ce_weight * distance
            if how.regress:
                apart = nn.functional.smooth_l1_loss(shifted(last, 1 + step)[columns], drafted)
                value = value + how.regress * apart
                parts[f"regress{step}"] = apart.detach()
            total = total + how.decay**step * value
            parts[f"loss{step}"] = distance.detach()
        return Losses(total, parts, torch.stack(agreement))
