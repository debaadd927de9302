from typing import ClassVar

from paceline.schema import checked
from paceline.train.head_recipe import HeadRecipe, HeadShape, TokenLoss, config_of
from paceline.train.recipe import Losses

from .drafter import OneConfig


@checked
class OneLoss:
    name: TokenLoss = "ce"


class OneRecipe(HeadRecipe):
    KINDS: ClassVar = {"next_but_one": (HeadShape, OneLoss)}

    @classmethod
    def configure(cls, plan):
        return config_of(OneConfig, plan)

    def loss(self, batch):
        labels, states = self.labels(batch), batch.states[self._last]
        columns = labels.columns(2)
        distance, right = labels.compare(self.head(states[columns]), columns, 2)
        return Losses(distance, {"loss0": distance.detach()}, right[None])
