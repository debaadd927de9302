"""What a run of `paceline train vlm` is: one YAML file for its stages.

    model: smollm2-135m                 paceline train vlm --config run.yaml talk.steps=600
    out: runs/tiny-vlm
    easy_vqa: data/easy_vqa

Everything else has a default.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.errors import ConfigError
from paceline.schema import Text, checked, validate
from paceline.train.config import Above0, AtLeast0, Name, Seed, Size, Tokens, read_mapping
from paceline.train.losses import LossName

from .questions import Kind
from .shape import TowerShape

_Pictures = Annotated[int, Field(ge=0, le=10_000)]
_Rank = Annotated[int, Field(ge=1, le=1 << 16)]
_Steps = Annotated[int, Field(ge=0, lt=2**31)]


@checked
class EyesSection:
    """First stage. batch: scenes a step; micro_batch: of them in one pass. minutes: take as many steps as fit.

    lr: its peak, reached after `warmup` steps, from where a cosine falls to 3%.
    """

    steps: Size = 1300
    minutes: Above0 | None = None
    batch: Annotated[int, Field(ge=1, le=10_000)] = 24
    micro_batch: Size = 24
    lr: Above0 = 1e-3
    warmup: _Steps = 100
    weight_decay: AtLeast0 = 0.05


@checked
class TalkSection:
    """Second stage. scenes, easy: pictures a step; one picture is one pass, and they add up.

    asks: questions of each kind about a scene, such as {short: 5, caption: 1}; empty: `lessons.PER_SCENE`, some of them
    as conversations of two turns.
    rank: of the low-rank layers in every linear layer; lr: their peak; eyes_lr: that of the tower and projector.
    """

    steps: Size = 480
    minutes: Above0 | None = None
    scenes: _Pictures = 2
    easy: _Pictures = 1
    rank: _Rank = 16
    lr: Above0 = 6e-4
    eyes_lr: AtLeast0 = 2e-4
    warmup: _Steps = 40
    weight_decay: AtLeast0 = 0.0
    asks: Mapping[Kind, Annotated[int, Field(ge=0, le=100)]] = field(default_factory=dict[Kind, int])


@checked
class DistillSection:
    """Third stage. layers: of the language model, evenly spaced. loss: a law's, see `train.losses`.

    ce_weight: of the cross entropy with the right answers, beside it. over: begin with the layers of the trained model,
    not with those of its base. teacher: a packaged model; None: the one that this run trained.
    """

    steps: Size = 600
    minutes: Above0 | None = None
    layers: Annotated[int, Field(ge=2)] = 8
    rank: _Rank = 64
    scenes: _Pictures = 2
    easy: _Pictures = 1
    loss: LossName = "kl"
    ce_weight: AtLeast0 = 0.0
    over: bool = True
    teacher: Name | None = None
    lr: Above0 = 1e-3
    warmup: _Steps = 40
    weight_decay: AtLeast0 = 0.0


@checked
class EvalSection:
    """Real greedy decoding. scenes: held-out ones for each kind of question; easy: pictures of easy-VQA's test split.

    None: all. nlvr: a folder with dev.json and images, each statement asked about the first of its pictures.
    engine: what decodes, Paceline's or plain transformers.
    """

    scenes: _Pictures = 40
    easy: _Pictures | None = 100
    nlvr: Name | None = None
    nlvr_limit: _Pictures | None = 200
    max_tokens: Tokens = 128
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    engine: Literal["paceline", "transformers"] = "paceline"


@checked
class VlmConfig:
    """A whole run. model: the language model, a zoo name or a folder. name: of what is trained, and of its folder.

    easy_vqa: the unpacked archive; None: scenes alone. base_model: hub id for the card. evaluate_every: steps;
    held_out: scenes of each kind that are looked at then.
    """

    model: Name
    out: Name
    name: Annotated[Name, Field(pattern=r"^\w[\w.-]*$")] = "tiny-vlm"
    easy_vqa: Name | None = None
    device: Name | None = None
    base_model: Text | None = None
    licence: Text = "Apache-2.0"
    seed: Seed = 0
    clip: Above0 = 1.0
    checkpoint_seconds: AtLeast0 = 180.0
    log_every: Size = 10
    evaluate_every: Size = 60
    held_out: Annotated[int, Field(ge=1, le=10_000)] = 12
    tower: TowerShape = field(default_factory=TowerShape)
    eyes: EyesSection = field(default_factory=EyesSection)
    talk: TalkSection = field(default_factory=TalkSection)
    distill: DistillSection = field(default_factory=DistillSection)
    eval: EvalSection = field(default_factory=EvalSection)

    def __post_init__(self) -> None:
        taken = ("eyes", "talk", "distill", "model")
        for name, holds, got, expected in (
            ("name", self.name.removesuffix("-small") not in taken, self.name, "no other folder of the run"),
            ("eyes.micro_batch", self.eyes.micro_batch <= self.eyes.batch, self.eyes.micro_batch, "up to eyes.batch"),
            ("talk.scenes", self.talk.scenes + self.talk.easy >= 1, 0, "with talk.easy at least 1"),
            ("distill.scenes", self.distill.scenes + self.distill.easy >= 1, 0, "with distill.easy at least 1"),
            ("talk.asks", not self.talk.asks or any(self.talk.asks.values()), 0, "at least one question"),
        ):
            if not holds:
                raise ConfigError(f"{name} is out of range", got=got, expected=expected)


def read_vlm_config(path: Path | str | None, overrides: Seq[str] = ()) -> VlmConfig:
    """The file with `a.b=value` put over it. Raises `ConfigError` for what is not understood."""
    return validate(VlmConfig, read_mapping(path, overrides), "the configuration")
