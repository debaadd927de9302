"""Training of DFlash heads: blocks of masks at random places of a text, all in one pass.

    text      x_0   x_1   x_2   x_3   x_4   x_5        states f_0 .. f_4
    block     anchor 2, of four rows:  x_2  mask  mask  mask      reads f_0, f_1 and its own rows
    labels                              -   x_3   x_4   x_5       the distributions head(f_2), head(f_3), head(f_4)

Row k of a block counts decay^(k - 1) (the paper: exp(-(k - 1) / 7) for blocks of 16).

A block of JetSpec has a mask behind each of its true tokens, and masks behind masks:

    tokens    x_2 x_3 x_4          behind x_2: mask mask mask       behind x_2 x_3: mask       behind x_2 x_3 x_4: mask
    labels                                     x_3  x_4  x_5                        x_4                            x_5
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.tree import ancestors
from ...schema import checked
from ...target import LoadedModel
from ...train.config import AtLeast0, AtLeast1, Few
from ...train.data import Answers
from ...train.head_recipe import Decay, HeadRecipe, LayersShape, TokenLoss, config_of, mask_token, state_samples
from ...train.recipe import Batch, Losses, Plan
from .head import DFlashConfig, attending


@checked
class DFlashShape(LayersShape):
    """Shape of a DFlash head.

    states: those that it reads; empty: five, evenly from the second to the last but two. block_size: one more than it
    drafts in a pass. mask_token_id: None: the padding token, or else the end of text. window: of `DFlashConfig`.
    """

    num_hidden_layers: Few = 5
    qk_norm: bool = True
    block_size: Annotated[int, Field(ge=2, le=256)] = 16
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    window: AtLeast1 | None = None


@checked
class DFlashLoss:
    """How a head is trained. name: see `losses` and `TokenLoss`. anchors: blocks in each text, at random places."""

    name: TokenLoss = "ce"
    decay: Decay = 0.87
    anchors: AtLeast1 = 32


@checked
class JetSpecLoss(DFlashLoss):
    """As `DFlashLoss`. alone: the weight of masks that follow a mask, beside those that follow the true tokens."""

    alone: AtLeast0 = 0.5


@dataclass(frozen=True)
class _Block:
    """The rows of a block. is_known: which hold a token of the text, and no mask [R]. offsets: from the anchor [R].

    sees: which rows each one reads [R, R]. taught: the rows with a label, the name of their loss, and its weight.
    """

    is_known: Tensor
    offsets: Tensor
    sees: Tensor
    taught: Sequence[tuple[int, str, float]]


class DFlashRecipe(HeadRecipe):
    """Train a `DFlashHead` that is attached to its target."""

    KINDS: ClassVar = {"dflash": (DFlashShape, DFlashLoss), "jetspec": (DFlashShape, JetSpecLoss)}
    STARTS: ClassVar = {"jetspec": {"dflash": ("causal", "block_size")}}
    CONFIG: ClassVar[type[DFlashConfig]] = DFlashConfig

    @classmethod
    def configure(cls, plan: Plan) -> DFlashConfig:
        layers = plan.target.num_layers
        evenly = torch.linspace(min(2, layers), max(layers - 2, 1), 5).round().int().tolist()
        more = {"mask_token_id": mask_token(plan), "causal": plan.method == "jetspec"}
        return config_of(cls.CONFIG, plan, states=tuple(sorted({*evenly})), **more)

    @torch.no_grad()
    def initialise(self, target: LoadedModel, answers: Answers, is_fresh: bool) -> None:
        """A fresh head takes the target's final norm; `fc` reads every channel of the states at one size."""
        norm: Any = getattr(target.model.base_model, "norm", None)
        if is_fresh and isinstance(norm, nn.Module):
            self.head.norm.weight.copy_(norm.weight)
        self.scale_inputs(self.head.fc.weight, [state_samples(target, answers, self.head.config.states)], is_fresh)

    def loss(self, batch: Batch) -> Losses:
        """Mean over the rows of all blocks, weighted by their place in the block."""
        head, (rows, length), block = self.head, batch.token_ids.shape, self._block
        columns, size = torch.arange(length, device=batch.token_ids.device), len(block.offsets)
        anchors, is_anchor = self._anchors(batch)
        count = anchors.shape[1]
        labels = self.labels(batch, is_anchor)
        states = torch.cat([batch.states[layer] for layer in head.config.states], -1)
        context = head.context(states, columns.expand(rows, -1))
        within = torch.block_diag(*[block.sees.to(columns.device)] * count).expand(rows, -1, -1)
        before = columns < anchors.repeat_interleave(size, 1)[..., None]  # [B, A * size, T]
        seen = torch.cat([before, within.bool()], -1)[:, None]
        positions = (anchors[..., None] + block.offsets.to(columns.device)).view(rows, -1)
        tokens = batch.token_ids.gather(1, positions.clamp(max=length - 1))
        masked = ~block.is_known.to(columns.device).repeat(count)
        tokens = tokens.masked_fill(masked, head.config.mask_token_id)
        hidden = head(tokens, positions, attending(context, seen)).view(rows, count, size, -1)
        hidden = self.drafting(hidden, batch, anchors)
        parts, agreement = dict[str, Tensor](), list[Tensor]()
        total = head.logits(hidden[:, :0, 0]).sum()  # zero, and part of the graph where nothing is supervised
        for row, name, weight in block.taught:
            ahead = int(block.offsets[row])
            columns_of = labels.columns(ahead)
            drafted = hidden[:, :, row][columns_of.gather(1, anchors)]  # anchors ascend: in the order of the columns
            distance, right = labels.compare(head.logits(drafted), columns_of, ahead)
            if name == "loss":
                agreement.append(right)
            if len(drafted) and weight:
                total = total + weight * self.settings.decay ** (ahead - 1) * distance
                parts[f"{name}{ahead - 1}"] = distance.detach()
        return Losses(total, parts, torch.stack(agreement))

    @cached_property
    def _block(self) -> "_Block":
        size = self.head.config.block_size
        if not self.head.config.causal:
            taught = [(row, "loss", 1.0) for row in range(1, size)]
            is_known = torch.arange(size) == 0
            return _Block(is_known, torch.arange(size), torch.ones(size, size, dtype=torch.bool), taught)
        tokens, masks = [*range(-1, size - 2)], [0, *range(size - 1, 2 * size - 3)]
        parents = torch.tensor([tokens + masks + [*range(1, size - 1)]])
        sees, last = ancestors(parents)[0], 2 * size - 2
        alone = [(row, "alone", self.settings.alone) for row in range(size, last)]
        behind = [(row, "loss", 1.0) for row in (size - 1, *range(last, len(parents[0])))]
        return _Block(torch.arange(len(sees)) < size - 1, sees.sum(1) - 1, sees, behind + alone)

    def drafting(self, hidden: Tensor, batch: Batch, anchors: Tensor) -> Tensor:
        """The states that the logits of all blocks are made of, from those of the layers [B, A, block_size, E]."""
        return hidden

    def _anchors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Columns before supervised tokens, ascending [B, A], and a mask of them [B, T]: at random, or evenly in eval.

        Rows with fewer end with columns that are not in the mask.
        """
        can = batch.is_answer.roll(-1, 1)
        can[:, 0] = can[:, -1] = False  # the first column has no state before it
        count = min(self.settings.anchors, can.shape[1])
        nth = can.cumsum(1) - 1
        evenly = -((nth * 0.6180339887) % 1.0)  # the golden ratio spreads any number of them
        chance = torch.rand(can.shape, device=can.device) if self.head.training else 1 + evenly
        chosen = chance.masked_fill(~can, -1.0).topk(count, 1).indices
        anchors = chosen.sort(1).values
        return anchors, can & torch.zeros_like(can).scatter(1, anchors, value=True)
