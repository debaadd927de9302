from typing import ClassVar

from paceline.schema import checked
from paceline.train.config import AtLeast1, Seed
from paceline.train.head_recipe import HeadRecipe, TokenLoss, head_sizes
from paceline.train.recipe import Losses

from .drafter import OneConfig


@checked
class OneShape:
    draft_vocab_size: AtLeast1 = 8192
    seed: Seed = 0


@checked
class OneLoss:
    name: TokenLoss = "ce"


class OneRecipe(HeadRecipe):
    KINDS: ClassVar = {"next_but_one": (OneShape, OneLoss)}

    @classmethod
    def configure(cls, plan):
        return OneConfig(**head_sizes(plan))

    def loss(self, batch):
        labels, states = self.labels(batch), batch.states[self._last]
        columns = labels.columns(2)
        distance, right = labels.compare(self.head(states[columns]), columns, 2)
        return Losses(distance, {"loss0": distance.detach()}, right[None])
