"""The interface of training methods: batches, losses, and `Recipe`, which computes losses from batches."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn
from transformers.processing_utils import ProcessorMixin

from ..schema import validate
from ..target import LoadedModel
from .config import RunConfig
from .data import Answers, Batch


@dataclass(frozen=True)
class Losses:
    """The loss to minimise, and values to report.

    total: scalar. parts: named scalars, detached. agreement: for each draft step the share of answer tokens whose
    greedy draft is the token of the answer, given the true tokens in the steps before; the offline estimate of the
    accepted length is computed from it. NaN for a step that this batch does not measure.
    """

    total: Float[Tensor, ""]
    parts: Mapping[str, Float[Tensor, ""]]
    agreement: Float[Tensor, " D"]


@dataclass(frozen=True)
class Plan:
    """The plan of a run. shape, settings: `head` and `train.loss` of the configuration, in the method's classes."""

    method: str
    config: RunConfig
    target: LoadedModel
    shape: Any
    settings: Any

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed, besides `train` and the answers."""
        sections = {"head": self.shape, "train.loss": self.settings}
        asked = {f"{name}.{key}": value for name, section in sections.items() for key, value in vars(section).items()}
        return {"method": self.method, "model": self.target.fingerprint, "start": self.config.start, **asked}


class Recipe(ABC):
    """Trains one module against one target. A new method is one file with a subclass, named in `methods.table`."""

    KINDS: ClassVar[Mapping[str, tuple[type[Any], type[Any]]]]
    """The classes of `head` and `train.loss` of a configuration, by method."""
    module: nn.Module
    input_scales: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    """See `Task.input_scales`."""
    states: tuple[int, ...]
    """Hidden states of the target that `loss` reads."""
    reads_images: bool = False
    """Whether `loss` reads the images of a prompt, and not only states of the target."""
    learns_prompts: ClassVar[bool] = False
    """Whether the tokens of a prompt may count as answer tokens."""
    processor: ProcessorMixin | None = None
    """Written beside a trained model that reads images."""
    makes_draft: ClassVar[bool] = False
    """Whether the result is a draft, in the folder `draft`, and not a head."""

    @classmethod
    def plan(cls, method: str, config: RunConfig, target: LoadedModel) -> Plan:
        """Raises `ConfigError` for unknown keys and wrong values."""
        shape, settings = cls.KINDS[method]
        shape, settings = validate(shape, config.head, "head"), validate(settings, config.train.loss, "train.loss")
        return Plan(method, config, target, shape, settings)

    @classmethod
    def layers(cls, plan: Plan) -> tuple[int, ...]:
        """Hidden states of the target that the stage `prepare` stores for `states`."""
        return ()

    @classmethod
    @abstractmethod
    def check(cls, plan: Plan) -> None:
        """Raise `ConfigError` or `IncompatibleModels` for what `build` would refuse. Nothing is made or written."""

    @classmethod
    @abstractmethod
    def build(cls, plan: Plan, answers: Answers) -> "Recipe":
        """A fresh module beside its target, in float32, and the recipe to train it.

        answers: those to train on; their most frequent tokens become the draft vocabulary.
        """

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        """The trained module, and the target it drafts for. A recipe that changes the target writes it to `model`."""
        return self.module, target

    @abstractmethod
    def loss(self, batch: Batch) -> Losses:
        """Loss of the module on a batch whose states are on the module's device, in its dtype."""
