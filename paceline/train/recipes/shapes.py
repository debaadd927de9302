"""What `head` and `train.loss` of a configuration may say, by method; None: as the paper or the target has it."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ...errors import ConfigError
from ...schema import Text, checked, validate
from ..config import AtLeast0, Few, Name, RunConfig, Seed, Several, Share, Size
from ..losses import LossName

_T = TypeVar("_T")
Lesson = LossName | Literal["token"]
"""Which loss; "token" is the cross entropy with the token that followed."""
Decay = Annotated[float, Field(gt=0, le=1)]
_Rank = Annotated[int, Field(ge=0, le=1 << 16)]


@checked
class EagleShape:
    """Shape of an EAGLE head. states: that EAGLE-3 reads, empty: a low, a middle and a high one. None: the target's."""

    draft_vocab_size: Size = 8192
    states: Several[Annotated[int, Field(ge=0)]] = ()
    intermediate_size: Size | None = None
    num_attention_heads: Few | None = None
    num_key_value_heads: Few | None = None
    own_lm_head: bool = False
    seed: Seed = 0


@checked
class EagleLoss:
    """How an EAGLE head is trained, see `EagleRecipe`; None: as its paper, with five steps for EAGLE-3."""

    name: LossName = "ce"
    steps: Few | None = None
    decay: Decay = 0.8
    regress: AtLeast0 | None = None
    ce_weight: AtLeast0 | None = None
    noise: AtLeast0 | None = None

    def as_paper(self, version: int) -> tuple[int, float, float, float]:
        """Steps, regress, ce_weight and noise. Raises `ConfigError` where nothing is left to learn."""
        paper = (5, 0.0, 1.0, 0.0) if version == 3 else (1, 1.0, 0.1, 0.1)
        asked = self.steps, self.regress, self.ce_weight, self.noise
        steps, regress, ce_weight, noise = (b if a is None else a for a, b in zip(asked, paper, strict=True))
        if not regress and not ce_weight:
            raise ConfigError("train.loss.regress and train.loss.ce_weight are 0", expected="one above 0")
        return int(steps), regress, ce_weight, noise


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
    """See `HeadsRecipe`. name: "token", or one of `losses`. decay: None: 0.8 for Medusa, 1 for blockwise."""

    name: Lesson = "ce"
    decay: Decay | None = None
    one_head: bool = False


@checked
class SpaceShape:
    """Shape of a SPACE adapter. mode: "gated" leaves the model as it is, "full" fine-tunes it.

    lora: train low-rank layers, not every weight. linears: where they act, by the last part of
    the name; empty: attention and MLP. The rest as in `SpaceConfig`.
    """

    mode: Literal["gated", "full"] = "gated"
    lora: bool = True
    num_masks: Few = 4
    shared_mask: bool = False
    rank: _Rank = 16
    linears: Several[Text] = ()
    transition_rank: _Rank = 64
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.mode == "gated" and not self.lora:
            raise ConfigError("head.lora is false, but a gated adapter consists of low-rank layers", fix="mode: full")
        if self.mode == "full" and self.lora and not self.rank:
            raise ConfigError(
                "low-rank layers of rank 0 train nothing of the model", got="head.rank=0, head.mode=full",
                expected="head.rank >= 1", fix="head.lora=false trains every weight",
            )  # fmt: skip


@checked
class SpaceLoss:
    """See `SpaceRecipe`. name: "token" (the paper), or one of `losses`: distillation from the target's own law.

    vocab_size: the most frequent tokens are learnt to be foreseen, which is faster; None: all.
    """

    name: Lesson = "ce"
    vocab_size: Size | None = None
    rows: Size = 512
    keep: Decay = 0.8
    decay: Decay = 0.8
    ar_weight: AtLeast0 = 1.0
    ar_share: Share = 0.5


@checked
class MtpShape:
    """Shape of MTP modules; None: the target's."""

    draft_vocab_size: Size = 8192
    num_modules: Few = 1
    intermediate_size: Size | None = None
    seed: Seed = 0


@checked
class MtpLoss:
    """See `MtpRecipe`. name: "token", or one of `losses`. steps: three, of which a lone module does all (FastMTP)."""

    name: Lesson = "ce"
    steps: Few | None = 3
    decay: Decay = 0.6


@checked
class QatShape:
    """What the draft's weights become. bits, group_size: of the codes. linears: as in `SpaceShape`.

    start: the first grids, "fitted" (least squared error) or "nearest" (least and largest weight). train: "weights" and
    grids, or "grids" alone, which takes a sixteenth of the optimiser's memory in groups of 32.
    """

    bits: Literal[4, 3, 2] = 4
    group_size: Literal[32, 64, 128, 256] = 32
    start: Literal["fitted", "nearest"] = "fitted"
    train: Literal["weights", "grids"] = "weights"
    linears: Several[Text] = ()


@checked
class QatLoss:
    """See `QatRecipe`. name: "token", or one of `losses`."""

    name: Lesson = "kl"
    label_weight: AtLeast0 = 0.0
    window: Few = 4
    context: Literal["target", "own"] = "target"


@checked
class DistillShape:
    """The small model. model: a folder or name to begin from; None: `num_layers` of the target's own layers.

    layers: which ones, "spaced" from the first to the last, or the "first" ones. embeddings: train them too. vision:
    what it sees of pictures, as `DraftModel`'s; auto: "shared" for layers of the target's own, else as there.
    """

    model: Name | None = None
    num_layers: Size | None = None
    layers: Literal["spaced", "first"] = "spaced"
    embeddings: bool = False
    vision: Literal["auto", "own", "shared", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.model is not None and self.num_layers is not None:
            raise ConfigError("head names a model and a number of layers", fix="leave out one of them")


@checked
class DistillLoss:
    """See `DistillRecipe`. name: "token", or one of `losses`."""

    name: Lesson = "kl"
    label_weight: AtLeast0 = 0.0
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    window: Few = 4
    rounds: Size = 8

    def __post_init__(self) -> None:
        if self.on_policy and self.name == "token":
            raise ConfigError(
                "tokens that the draft draws are no labels", got="train.loss.name=token", fix="on_policy=0, or name=kl"
            )


def shape_of(kind: type[_T], config: RunConfig) -> _T:
    """What `head` says. Raises `ConfigError`."""
    return validate(kind, config.head, "head")


def loss_of(kind: type[_T], config: RunConfig) -> _T:
    """What `train.loss` says. Raises `ConfigError`."""
    return validate(kind, config.train.loss, "train.loss")
