"""What a run of `paceline train vlm` is: one YAML file for its stages.

    model: smollm2-135m                 paceline train vlm --config run.yaml talk.steps=600
    out: runs/tiny-vlm
    easy_vqa: data/easy_vqa

Everything else has a default.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...errors import ConfigError
from ...scenes import KINDS
from ..config import build, read_mapping
from .shape import TowerShape


@dataclass(frozen=True)
class EyesSection:
    """First stage. batch: scenes a step; micro_batch: of them in one pass. minutes: take as many steps as fit.

    lr: its peak, reached after `warmup` steps, from where a cosine falls to 3%.
    """

    steps: int = 1300
    minutes: float | None = None
    batch: int = 24
    micro_batch: int = 24
    lr: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.05


@dataclass(frozen=True)
class TalkSection:
    """Second stage. scenes, easy: pictures a step; one picture is one pass, and they add up.

    asks: questions of each kind about a scene, such as {short: 5, caption: 1}; empty: `lessons.PER_SCENE`, some of them
    as conversations of two turns.
    rank: of the low-rank layers in every linear layer; lr: their peak; eyes_lr: that of the tower and projector.
    """

    steps: int = 480
    minutes: float | None = None
    scenes: int = 2
    easy: int = 1
    rank: int = 16
    lr: float = 6e-4
    eyes_lr: float = 2e-4
    warmup: int = 40
    weight_decay: float = 0.0
    asks: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class DistillSection:
    """Third stage. layers: of the language model, evenly spaced. loss: a law's, see `train.losses`.

    ce_weight: of the cross entropy with the right answers, beside it. over: begin with the layers of the trained model,
    not with those of its base. teacher: a packaged model; None: the one that this run trained.
    """

    steps: int = 600
    minutes: float | None = None
    layers: int = 8
    rank: int = 64
    scenes: int = 2
    easy: int = 1
    loss: str = "kl"
    ce_weight: float = 0.0
    over: bool = True
    teacher: str | None = None
    lr: float = 1e-3
    warmup: int = 40
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EvalSection:
    """Real greedy decoding. scenes: held-out ones for each kind of question; easy: pictures of easy-VQA's test split.

    None: all. nlvr: a folder with dev.json and images, each statement asked about the first of its pictures.
    engine: what decodes, Paceline's or plain transformers.
    """

    scenes: int = 40
    easy: int | None = 100
    nlvr: str | None = None
    nlvr_limit: int | None = 200
    max_tokens: int = 128
    dtype: str = "float32"
    engine: Literal["paceline", "transformers"] = "paceline"


@dataclass(frozen=True)
class VlmConfig:
    """A whole run. model: the language model, a zoo name or a folder. name: of what is trained, and of its folder.

    easy_vqa: the unpacked archive; None: scenes alone. base_model: hub id for the card. evaluate_every: steps;
    held_out: scenes of each kind that are looked at then.
    """

    model: str
    out: str
    name: str = "tiny-vlm"
    easy_vqa: str | None = None
    device: str | None = None
    base_model: str | None = None
    licence: str = "Apache-2.0"
    seed: int = 0
    clip: float = 1.0
    checkpoint_seconds: float = 180.0
    log_every: int = 10
    evaluate_every: int = 60
    held_out: int = 12
    tower: TowerShape = field(default_factory=TowerShape)
    eyes: EyesSection = field(default_factory=EyesSection)
    talk: TalkSection = field(default_factory=TalkSection)
    distill: DistillSection = field(default_factory=DistillSection)
    eval: EvalSection = field(default_factory=EvalSection)

    def __post_init__(self) -> None:
        for name, holds, expected in (
            ("clip", self.clip > 0, "above 0"),
            ("log_every", self.log_every >= 1, "at least 1"),
            ("evaluate_every", self.evaluate_every >= 1, "at least 1"),
            ("eyes.batch", self.eyes.batch >= self.eyes.micro_batch >= 1, "at least eyes.micro_batch, and that 1"),
            ("talk.scenes", self.talk.scenes + self.talk.easy >= 1, "with talk.easy at least 1"),
            ("distill.scenes", self.distill.scenes + self.distill.easy >= 1, "with distill.easy at least 1"),
            ("talk.rank", self.talk.rank >= 1, "at least 1"),
            ("talk.asks", not self.talk.asks or _asks(self.talk.asks), f"a number of each of {', '.join(KINDS)}"),
            ("distill.rank", self.distill.rank >= 1, "at least 1"),
        ):
            if not holds:
                section, _, key = name.rpartition(".")
                got = getattr(getattr(self, section) if section else self, key)
                raise ConfigError(f"{name} is out of range", got=got, expected=expected)
        for name, section in (("eyes", self.eyes), ("talk", self.talk), ("distill", self.distill)):
            if section.steps < 1 or section.lr <= 0 or (section.minutes is not None and section.minutes <= 0):
                raise ConfigError(f"{name} needs steps, minutes and lr above 0", got=section)


def _asks(asks: Mapping[str, int]) -> bool:
    return set(asks) <= set(KINDS) and min(asks.values()) >= 0 and max(asks.values()) >= 1


def read_vlm_config(path: Path | str | None, overrides: Seq[str] = ()) -> VlmConfig:
    """The file with `a.b=value` put over it. Raises `ConfigError` for what is not understood."""
    return build(VlmConfig, read_mapping(path, overrides))
