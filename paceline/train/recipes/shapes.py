"""What `head` and `train.loss` of a configuration may say, by method; None: as the paper or the target has it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EagleShape:
    """Shape of an EAGLE head. states: that EAGLE-3 reads, empty: a low, a middle and a high one. None: the target's."""

    draft_vocab_size: int = 8192
    states: tuple[int, ...] = ()
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    own_lm_head: bool = False
    seed: int = 0


@dataclass(frozen=True)
class EagleLoss:
    """How an EAGLE head is trained, see `EagleRecipe`; None: as its paper, with five steps for EAGLE-3."""

    name: str = "ce"
    steps: int | None = None
    decay: float = 0.8
    regress: float | None = None
    ce_weight: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class ParallelShape:
    """Shape of parallel heads. num_layers, own_lm_head: Medusa's; intermediate_size: blockwise, None: 4 E."""

    draft_vocab_size: int = 8192
    num_heads: int = 4
    num_layers: int = 1
    own_lm_head: bool = False
    intermediate_size: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class ParallelLoss:
    """See `HeadsRecipe`. name: "token", or one of `losses`. decay: None: 0.8 for Medusa, 1 for blockwise."""

    name: str = "ce"
    decay: float | None = None
    one_head: bool = False


@dataclass(frozen=True)
class SpaceShape:
    """Shape of a SPACE adapter. mode: "gated" leaves the model as it is, "full" fine-tunes it.

    lora: train low-rank layers, not every weight. linears: where they act, by the last part of
    the name; empty: attention and MLP. The rest as in `SpaceConfig`.
    """

    mode: Literal["gated", "full"] = "gated"
    lora: bool = True
    num_masks: int = 4
    shared_mask: bool = False
    rank: int = 16
    linears: tuple[str, ...] = ()
    transition_rank: int = 64
    seed: int = 0


@dataclass(frozen=True)
class SpaceLoss:
    """See `SpaceRecipe`. name: "token" (the paper), or one of `losses`: distillation from the target's own law.

    vocab_size: the most frequent tokens are learnt to be foreseen, which is faster; None: all.
    """

    name: str = "ce"
    vocab_size: int | None = None
    rows: int = 512
    keep: float = 0.8
    decay: float = 0.8
    ar_weight: float = 1.0
    ar_share: float = 0.5


@dataclass(frozen=True)
class MtpShape:
    """Shape of MTP modules; None: the target's."""

    draft_vocab_size: int = 8192
    num_modules: int = 1
    intermediate_size: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class MtpLoss:
    """See `MtpRecipe`. name: "token", or one of `losses`. steps: three, of which a lone module does all (FastMTP)."""

    name: str = "ce"
    steps: int | None = 3
    decay: float = 0.6


@dataclass(frozen=True)
class QatShape:
    """What the draft's weights become. bits, group_size: of the codes. linears: as in `SpaceShape`.

    start: the first grids, "fitted" (least squared error) or "nearest" (least and largest weight). train: "weights" and
    grids, or "grids" alone, which takes a sixteenth of the optimiser's memory in groups of 32.
    """

    bits: Literal[4, 3, 2] = 4
    group_size: Literal[32, 64, 128, 256] = 32
    start: Literal["fitted", "nearest"] = "fitted"
    train: Literal["weights", "grids"] = "weights"
    linears: tuple[str, ...] = ()


@dataclass(frozen=True)
class QatLoss:
    """See `QatRecipe`. name: "token", or one of `losses`."""

    name: str = "kl"
    label_weight: float = 0.0
    window: int = 4
    context: Literal["target", "own"] = "target"


@dataclass(frozen=True)
class DistillShape:
    """The small model. model: a folder or name to begin from; None: `num_layers` of the target's own layers.

    layers: which ones, "spaced" from the first to the last, or the "first" ones. embeddings: train them too. vision:
    what it sees of pictures, as `DraftModel`'s; auto: "shared" for layers of the target's own, else as there.
    """

    model: str | None = None
    num_layers: int | None = None
    layers: Literal["spaced", "first"] = "spaced"
    embeddings: bool = False
    vision: Literal["auto", "own", "shared", "none"] = "auto"


@dataclass(frozen=True)
class DistillLoss:
    """See `DistillRecipe`. name: "token", or one of `losses`."""

    name: str = "kl"
    label_weight: float = 0.0
    on_policy: float = 0.0
    window: int = 4
    rounds: int = 8
