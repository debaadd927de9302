"""The settings of a run: one YAML file for all stages.

    model: smollm2-135m                 python -m examples.tiny_vlm train --config run.yaml sft.steps=600
    out: runs/tiny-vlm
    easy_vqa: data/easy_vqa

Everything else has a default.
"""

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.errors import ConfigError
from paceline.schema import Text, checked, validate
from paceline.train.config import AtLeast0, AtLeast1, LoopConfig, Name, Tokens, read_mapping
from paceline.train.losses import LossName

from .model import TowerShape

_Images = Annotated[int, Field(ge=0, le=10_000)]
_Rank = Annotated[int, Field(ge=1, le=1 << 16)]


@checked
class PretrainSection(LoopConfig):
    """Vision pretraining. batch: scenes a step; micro_batch: how many of them share a pass."""

    steps: AtLeast1 = 1300
    batch: Annotated[int, Field(ge=1, le=10_000)] = 24
    micro_batch: AtLeast1 = 24
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.08
    weight_decay: AtLeast0 = 0.05
    evaluate_every: AtLeast1 | None = 60


@checked
class SftSection(LoopConfig):
    """Supervised fine-tuning. scenes, easy: images a step; one image is one pass, and they add up.

    rank: of the low-rank layers in every linear layer. vision_lr: the learning rate of tower and projector as a share
    of `lr`.
    """

    steps: AtLeast1 = 480
    scenes: _Images = 2
    easy: _Images = 1
    rank: _Rank = 16
    lr: Annotated[float, Field(gt=0)] = 6e-4
    vision_lr: AtLeast0 = 1 / 3
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.08
    evaluate_every: AtLeast1 | None = 60


@checked
class DistillSection(LoopConfig):
    """Distillation. layers: of the language model, evenly spaced. loss: see `train.losses`."""

    steps: AtLeast1 = 600
    layers: Annotated[int, Field(ge=2)] = 8
    rank: _Rank = 64
    scenes: _Images = 2
    easy: _Images = 1
    loss: LossName = "kl"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.08
    evaluate_every: AtLeast1 | None = 60


@checked
class EvalSection:
    """Real greedy decoding. scenes: held-out ones, each with a question of every kind; easy: images of easy-VQA."""

    scenes: _Images = 40
    easy: _Images = 100
    max_tokens: Tokens = 128


@checked
class VlmConfig:
    """A whole run. model: the language model, a zoo name or a folder. name: of the trained model, and of its folder.

    easy_vqa: the unpacked archive; None: scenes alone. base_model: hub id for the card. held_out: scenes of each kind
    to evaluate on while training.
    """

    model: Name
    out: Name
    name: Annotated[Name, Field(pattern=r"^\w[\w.-]*$")] = "tiny-vlm"
    easy_vqa: Name | None = None
    device: Name | None = None
    base_model: Text | None = None
    licence: Text = "Apache-2.0"
    held_out: Annotated[int, Field(ge=1, le=10_000)] = 12
    tower: TowerShape = field(default_factory=TowerShape)
    pretrain: PretrainSection = field(default_factory=PretrainSection)
    sft: SftSection = field(default_factory=SftSection)
    distill: DistillSection = field(default_factory=DistillSection)
    eval: EvalSection = field(default_factory=EvalSection)

    def __post_init__(self) -> None:
        taken = ("pretrain", "sft", "distill", "model")
        for name, holds, got, expected in (
            ("name", self.name.removesuffix("-small") not in taken, self.name, "no other folder of the run"),
            ("sft.scenes", self.sft.scenes + self.sft.easy >= 1, 0, "with sft.easy at least 1"),
            ("distill.scenes", self.distill.scenes + self.distill.easy >= 1, 0, "with distill.easy at least 1"),
        ):
            if not holds:
                raise ConfigError(f"{name} is out of range", got=got, expected=expected)


def read_vlm_config(path: Path | str | None, overrides: Sequence[str] = ()) -> VlmConfig:
    """The file with `a.b=value` put over it. Raises `ConfigError` for what is not understood."""
    return validate(VlmConfig, read_mapping(path, overrides), "the configuration")
