"""What a training recipe is: a module, the target states it reads, and its loss on a batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.processing_utils import ProcessorMixin

from ..errors import ConfigError
from ..runner import LoadedModel
from .pictures import PicturedChat


@dataclass(frozen=True)
class Batch:
    """Some answers side by side, each from the first token of its prompt, padded at the end.

    token_ids: 0 where padded. states: of the target by layer; the state of column t was computed from tokens 0 to t;
    zero where padded, and at each answer's last token, which the target never read. is_answer: True where the token
    was written by the target: losses are for these tokens only. chats: of each answer whose prompt has pictures, else
    None; empty where none has.
    """

    token_ids: Int[Tensor, "B T"]
    states: Mapping[int, Float[Tensor, "B T E"]]
    is_answer: Bool[Tensor, "B T"]
    chats: tuple[PicturedChat | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Answer tokens, of which each is one lesson."""
        return int(self.is_answer.sum())


@dataclass(frozen=True)
class Losses:
    """The loss to descend, and what to show of it.

    total: scalar. parts: named scalars, detached. agreement: for each draft step the share of answer tokens whose
    greedy draft is the token the target chose, given that the steps before were fed the true tokens; the basis of the
    offline estimate of the accepted length.
    """

    total: Float[Tensor, ""]
    parts: Mapping[str, Float[Tensor, ""]]
    agreement: Float[Tensor, " D"]


class Recipe(ABC):
    """Trains one module against one target."""

    module: nn.Module
    states: tuple[int, ...]
    """Hidden states of the target that `loss` reads."""
    identity: str = ""
    """What else must be the same for a run to go on: nothing that shapes, settings and answers tell already."""
    sees: bool = False
    """Whether `loss` reads the pictures of a prompt itself, and not through states of the target."""
    processor: ProcessorMixin | None = None
    """Written beside a trained model that sees."""

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        """What drafts, and for which target. A recipe that changes the target writes it to the folder `model`."""
        return self.module, target

    def check_sees(self, has_pictures: bool, has_states: bool) -> None:
        """Raise `ConfigError` for data with pictures whose placeholders would be read as words.

        has_states: stored ones, in which the target's look at the pictures is.
        """
        if has_pictures and not self.sees and not (self.states and has_states):
            raise ConfigError(
                f"{type(self).__name__} does not read pictures", got="answers to prompts with pictures",
                fix="prepare them with prepare.states=store" if self.states else "leave these answers out",
            )  # fmt: skip

    @abstractmethod
    def loss(self, batch: Batch) -> Losses:
        """Loss of the module on a batch whose states are on the module's device, in its dtype."""
