"""Training of DSpark heads: DFlash's blocks, in which each row is also told the true token before it.

block     anchor 2, of four rows:  x_2  mask  mask  mask      as in `dflash.recipe`
told                                -   x_2   x_3   x_4       what the Markov head reads beside the hidden states
labels                              -   x_3   x_4   x_5
"""

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...schema import checked
from ...target import LoadedModel
from ...train.data import Answers
from ...train.recipe import Batch, Plan
from ..dflash.recipe import DFlashLoss, DFlashRecipe, DFlashShape
from ..heads.parts import Width
from .head import DSparkConfig, DSparkHead, MarkovType


@checked
class DSparkShape(DFlashShape):
    """Shape of a DSpark head. markov_rank, markov_head_type, tells_first: of `DSparkConfig`."""

    markov_rank: Width = 128
    markov_head_type: MarkovType = "rnn"
    tells_first: bool = True


@checked
class DSparkLoss(DFlashLoss):
    """How a head is trained. frozen: the block of a started head does not learn."""

    frozen: bool = False


@final
class DSparkRecipe(DFlashRecipe):
    """Train a `DSparkHead` that is attached to its target. It can start from a DFlash head."""

    KINDS: ClassVar = {"dspark": (DSparkShape, DSparkLoss)}
    STARTS: ClassVar = {"dspark": {"dflash": ("markov_rank", "markov_head_type", "tells_first")}}
    CONFIG: ClassVar = DSparkConfig
    head: DSparkHead

    @classmethod
    def check_loss(cls, config: DSparkConfig, settings: Any) -> None:
        if config.own_tables:
            fix = "start from a head that Paceline trained"
            raise ConfigError("a head with tables of its own does not learn further", fix=fix)

    @classmethod
    def check(cls, plan: Plan) -> None:
        super().check(plan)
        if plan.settings.frozen and plan.config.start is None:
            fix = "name the head that has it: start="
            raise ConfigError("a fresh block cannot be frozen", got="train.loss.frozen true", fix=fix)

    @torch.no_grad()
    def initialise(self, target: LoadedModel, answers: Answers, is_fresh: bool) -> None:
        """W2 is zero at first: a started head drafts as the DFlash head did."""
        super().initialise(target, answers, is_fresh)
        head, scales = self.head, dict(self.input_scales)
        markov: Any = head.markov_head
        is_fresh = not bool(markov.markov_w2.weight.any())
        one = torch.ones(1, markov.rank)
        read = {
            markov.markov_w1.weight: [nn.functional.embedding(head.draft_ids, head.embeddings).float()],
            markov.markov_w2.weight: [one / 4],  # it has to reach the size of the states
        }
        if markov.kind == "rnn":
            read[markov.joint_proj.weight] = [one, one, head.norm.weight.detach().abs()[None]]
        elif markov.kind == "gated":
            read[markov.gate_proj.weight] = [head.norm.weight.detach().abs()[None], one]
        for weight, parts in read.items():
            self.scale_inputs(weight, parts, is_fresh)
            scales |= self.input_scales
        self.input_scales = scales
        if self.settings.frozen:
            head.requires_grad_(False)
            markov.requires_grad_(True)

    def drafting(self, hidden: Tensor, batch: Batch, anchors: Tensor) -> Tensor:
        """The output rows of a token times `markov_w2` z are what W2 adds to its logit, so that z moves the states."""
        head, (rows, count, size, _) = self.head, hidden.shape
        places = anchors[..., None] + torch.arange(-1, size - 1, device=anchors.device)
        places = places.clamp(0, batch.token_ids.shape[1] - 1).view(rows, -1)
        before = head.before(batch.token_ids.gather(1, places)).view(rows, count, size, -1)
        state, made = torch.zeros_like(before[:, :, 0]), [torch.zeros_like(before[:, :, 0])]
        for row in range(1, size):
            z, state = head.markov_head(before[:, :, row], hidden[:, :, row], state)
            made.append(z if row > 1 or head.config.tells_first else torch.zeros_like(z))
        return hidden + head.markov_head.markov_w2(torch.stack(made, 2))
