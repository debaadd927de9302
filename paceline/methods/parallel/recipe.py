"""Training of parallel heads: each head learns one label, all from the same state (see `methods.parallel.head`).

Head i reads f_t and learns x_{t+2+i}, or the target's distribution of it: its output rows on f_{t+1+i}.
Example: tokens [A, B, C, D], the answer being C and D: head 0 learns f_0 -> C and f_1 -> D, head 1 f_0 -> D.

The output layer is most of the cost, so only supervised columns go through it.
"""

from typing import ClassVar, final

import torch
from torch import Tensor

from ...schema import checked
from ...train.config import AtLeast1, Few, Seed
from ...train.head_recipe import Decay, HeadRecipe, TokenLoss, head_sizes
from ...train.recipe import Batch, Losses, Plan
from .head import BlockwiseConfig, MedusaConfig, MedusaHead


@checked
class MedusaShape:
    """Shape of Medusa's heads. num_layers: residual blocks in each."""

    draft_vocab_size: AtLeast1 = 8192
    num_heads: Few = 4
    num_layers: Few = 1
    own_lm_head: bool = False
    seed: Seed = 0


@checked
class BlockwiseShape:
    """Shape of blockwise heads. intermediate_size: None: 4 E."""

    draft_vocab_size: AtLeast1 = 8192
    num_heads: Few = 4
    intermediate_size: AtLeast1 | None = None
    seed: Seed = 0


@checked
class ParallelLoss:
    """How parallel heads are trained.

    decay: head i weighs decay^i; None: 0.8 for Medusa, 1 (the mean) for blockwise. one_head: train one head a batch,
    drawn uniformly, as Stern et al. do to save memory; the agreement of the others is then NaN. In evaluation mode all
    heads are measured.
    """

    name: TokenLoss = "ce"
    decay: Decay | None = None
    one_head: bool = False


@final
class ParallelRecipe(HeadRecipe):
    """Train Medusa or blockwise heads that are attached to their target."""

    KINDS: ClassVar = {"medusa": (MedusaShape, ParallelLoss), "blockwise": (BlockwiseShape, ParallelLoss)}

    @classmethod
    def configure(cls, plan: Plan) -> MedusaConfig | BlockwiseConfig:
        shape, sizes = plan.shape, head_sizes(plan) | {"num_heads": plan.shape.num_heads}
        if plan.method == "medusa":
            return MedusaConfig(**sizes, num_layers=shape.num_layers, own_lm_head=shape.own_lm_head)
        return BlockwiseConfig(**sizes, intermediate_size=shape.intermediate_size or 4 * plan.target.hidden_size)

    @property
    def decay(self) -> float:
        usual = 0.8 if isinstance(self.head, MedusaHead) else 1.0
        return usual if self.settings.decay is None else self.settings.decay

    def loss(self, batch: Batch) -> Losses:
        head, states, decay = self.head, batch.states[self._last], self.decay
        labels = self.labels(batch)
        trained = range(head.num_heads)
        if self.settings.one_head and head.training:
            drawn = int(torch.randint(head.num_heads, ()))
            trained = range(drawn, drawn + 1)
        total, weight, parts = states.new_zeros(()), 0.0, dict[str, Tensor]()
        agreement = torch.full((head.num_heads,), float("nan"), device=states.device)
        for i in trained:
            columns = labels.columns(2 + i)
            logits = head.logits(head.hidden(states[columns], i), i)
            value, agreement[i] = labels.compare(logits, columns, 2 + i)
            total, weight = total + decay**i * value, weight + decay**i
            parts[f"loss{i}"] = value.detach()
        return Losses(total / weight, parts, agreement)
