"""Training of parallel heads: each head learns one label, all from the same state.

    column     t          t+1         t+2        t+3
    token      x_t        x_{t+1}     x_{t+2}    x_{t+3}
    state      f_t        f_{t+1}     f_{t+2}
    head 0 reads f_t      label x_{t+2}, or the target's distribution of it: its output rows on f_{t+1}
    head 1 reads f_t      label x_{t+3}, or the target's distribution of it: its output rows on f_{t+2}
    head i reads f_t      label x_{t+2+i}                                                     f_{t+1+i}

Example: tokens [A, B, C, D], the answer being C and D: head 0 learns f_0 -> C and f_1 -> D, head 1 f_0 -> D.

The output layer is most of the cost, so only supervised columns go through it.
"""

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ...heads.parallel import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from ...runner import LoadedModel
from ...schema import checked
from ..config import Few, Seed, Size
from ..losses import Loss
from ..recipe import Batch, Losses
from .common import Decay, HeadRecipe, Labels, TokenLoss, check_decay, loss_or_token


@checked
class MedusaShape:
    """Shape of Medusa's heads. num_layers: residual blocks in each."""

    draft_vocab_size: Size = 8192
    num_heads: Few = 4
    num_layers: Few = 1
    own_lm_head: bool = False
    seed: Seed = 0


@checked
class BlockwiseShape:
    """Shape of blockwise heads. intermediate_size: None: 4 E."""

    draft_vocab_size: Size = 8192
    num_heads: Few = 4
    intermediate_size: Size | None = None
    seed: Seed = 0


@checked
class ParallelLoss:
    """See `ParallelRecipe`. name: "token", or one of `losses`. decay: None: 0.8 for Medusa, 1 for blockwise."""

    name: TokenLoss = "ce"
    decay: Decay | None = None
    one_head: bool = False


@final
class ParallelRecipe(HeadRecipe):
    """Train Medusa or blockwise heads that are attached to their target.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. loss: between the target's distribution and a
    head's, see `losses`; None: cross entropy with the token that followed. decay: head i weighs decay^i (Medusa: 0.8;
    blockwise: 1, the mean). one_head: train one head a batch, drawn uniformly, as Stern et al. do to save memory; the
    agreement of the others is then NaN. In evaluation mode all heads are measured. Raises `ConfigError`.
    """

    KINDS: ClassVar = {
        "medusa": (MedusaHead, MedusaShape, ParallelLoss),
        "blockwise": (BlockwiseHead, BlockwiseShape, ParallelLoss),
    }

    def __init__(
        self, module: MedusaHead | BlockwiseHead, lm_head: Tensor, loss: Loss | None = None, decay: float = 0.8,
        one_head: bool = False,
    ):  # fmt: skip
        check_decay(decay)
        super().__init__(module, lm_head, loss)
        self.decay, self.one_head = decay, one_head

    @classmethod
    def configure(cls, method: str, shape: Any, target: LoadedModel) -> MedusaConfig | BlockwiseConfig:
        """The heads' configuration."""
        size, states, vocab_size = target.hidden_size, (target.num_layers,), target.vocab_size
        drafted = min(shape.draft_vocab_size, vocab_size)
        if method == "blockwise":
            return BlockwiseConfig(
                size, shape.num_heads, shape.intermediate_size or 4 * size, states, drafted, vocab_size
            )
        layers, own = shape.num_layers, shape.own_lm_head
        return MedusaConfig(size, shape.num_heads, states, drafted, vocab_size, layers, own_lm_head=own)

    @classmethod
    def options(cls, method: str, loss: ParallelLoss, target: LoadedModel) -> dict[str, Any]:
        """The paper's decay where the configuration does not say."""
        decay = loss.decay if loss.decay is not None else 0.8 if method == "medusa" else 1.0
        return {"loss": loss_or_token(loss.name), "decay": decay, "one_head": loss.one_head}

    def loss(self, batch: Batch) -> Losses:
        """Mean of the heads' losses, weighted."""
        head, states = self.head, batch.states[self.states[0]]
        labels = Labels(batch, states, self._rows, self._index, self._loss)
        trained = range(head.num_heads)
        if self.one_head and head.training:
            drawn = int(torch.randint(head.num_heads, ()))
            trained = range(drawn, drawn + 1)
        total, weight, parts = states.new_zeros(()), 0.0, dict[str, Tensor]()
        agreement = [states.new_full((), float("nan")) for _ in range(head.num_heads)]
        for i in trained:
            columns = labels.columns(2 + i)
            logits = head.logits(head.hidden(states[columns], i), i)  # [M, Vd]
            value = labels.loss(logits, columns, 2 + i)
            total, weight = total + self.decay**i * value, weight + self.decay**i
            parts[f"loss{i}"] = value.detach()
            agreement[i] = labels.agreement(logits, columns, 2 + i).to(states.dtype)
        return Losses(total / weight, parts, torch.stack(agreement))
