"""Quantisation-aware training of the self-draft: the target's own layers in a few bits learn its distributions.

Teacher and student are one model; the student's linear layers are `FakeInt4Linear`. As when it drafts, the student
reads the target's keys and values of the committed text and only its own of the tokens of the round (`rounds`), so
that it learns to draft over the shared cache. context="own" trains it as a model by itself instead.

Of a target that reads images, the language model is trained, on the features that its tower makes of each prompt's
images: they are in the cache that the student reads, as when it drafts.

The result is the rounded draft, not the weights that were trained: codes and grids, 4.5 bits a weight with 4 bits in
groups of 32 (`head`).
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ConfigError
from ...quant.fake import FakeInt4Linear
from ...quant.int4 import fits_int4
from ...schema import Text, checked
from ...target import LoadedModel
from ...target.adapters import share_copy
from ...train.config import AtLeast0, Few, Several
from ...train.data import Answers
from ...train.head_recipe import TokenLoss
from ...train.images import BatchReader, ModelInput
from ...train.losses import LOSSES, Loss, compared
from ...train.models import layers_of, linears_of, outlined, plain_models, windows_of
from ...train.recipe import Batch, Losses, Plan, Recipe
from ...train.rounds import Rounds, read_rounds, read_text, rounds_of
from .head import Int4Draft, Int4DraftConfig


@checked
class QatShape:
    """The format of the draft's weights. bits, group_size: of the codes. linears: as in `SpaceShape`.

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
    """How the draft is trained.

    label_weight: of the "token" loss, which is added to another one. window: tokens of a round; in training rounds
    begin at random places. context: what the student reads of the committed text, the target's keys and values or its
    own.
    """

    name: TokenLoss = "kl"
    label_weight: AtLeast0 = 0.0
    window: Few = 4
    context: Literal["target", "own"] = "target"


@final
class Fakes(nn.Module):
    """The fake-quantised layers of a student, by layer and name."""

    def __init__(self, config: Int4DraftConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(config.num_layers))

    def packed(self) -> Int4Draft:
        draft = Int4Draft(self.config)
        for index, layer in enumerate(self.layers):
            for name, fake in zip(self.config.linears, cast("Any", layer).values(), strict=True):
                draft.put(index, name, *(t.cpu() for t in fake.packable()))
        return draft


@final
class QatRecipe(Recipe):
    """Train fake-quantised layers of `student` against `plain`. reader: of a target that reads images."""

    KINDS: ClassVar = {"qat": (QatShape, QatLoss)}
    states = ()
    makes_draft: ClassVar[bool] = True

    def __init__(
        self, plain: PreTrainedModel, student: nn.Module, fakes: Fakes, settings: QatLoss,
        reader: BatchReader | None = None,
    ):  # fmt: skip
        self.module, self._plain, self._student = fakes, plain, student
        self.settings, self._loss, self._windows = settings, LOSSES.get(settings.name), windows_of(plain)
        self._reader, self.reads_images = reader, reader is not None

    @classmethod
    def check(cls, plan: Plan) -> None:
        if (start := plan.config.start) is not None:
            raise ConfigError("QAT begins from the target's weights", got=f"start {start!r}", fix="leave it out")
        _rounded(outlined(plan.config.model)[0], plan.shape)

    @classmethod
    def build(cls, plan: Plan, answers: Answers) -> Recipe:
        plain, _ = plain_models(plan.config.model, plan.target.device)
        reader = None if plan.target.vision is None else BatchReader(plan.target)
        student, fakes = faked(plain, plan.shape)
        return cls(plain, student, fakes, plan.settings, reader)

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        return cast("Fakes", self.module).packed(), target

    def loss(self, batch: Batch) -> Losses:
        """Mean over the answer tokens; agreement by their place in a round."""
        how = self.settings
        text = self._reader.target(batch) if self._reader else ModelInput(batch.token_ids, batch.is_answer)
        with torch.no_grad():
            teacher, cache = read_text(self._plain, text, self._windows)
        phases = torch.randint(how.window, (len(text.ids),)) if self.module.training else None
        rounds = rounds_of(batch.is_answer, how.window, phases)
        if how.context == "target":
            fed = text.ids.gather(1, rounds.column.clamp_min(0))
            logits = read_rounds(self._student, fed, rounds, text, cache, self._windows)[rounds.counts]
        else:
            logits = rounds.take(read_text(self._student, text, self._windows)[0], -text.first)
        teacher = rounds.take(teacher, -text.first)
        return round_losses(logits, teacher, text.ids, rounds, self._loss, how.label_weight, how.window)


def round_losses(
    logits: Tensor, teacher: Tensor, ids: Tensor, rounds: Rounds, loss: Loss | None, label_weight: float, window: int
) -> Losses:
    """Losses of the draft's logits against the target's, both [M, V] at the rows that count."""
    labels = rounds.take(ids, 1)
    parts, total = dict[str, Tensor](), logits.new_zeros(())
    if loss is not None:
        total = loss(teacher, logits)
        parts["loss"] = total.detach()
    if loss is None or label_weight:
        token = nn.functional.cross_entropy(logits, labels)
        parts["token"] = token.detach()
        total = total + (label_weight if loss is not None else 1.0) * token
    acceptance, greedy = compared(teacher, logits.detach())
    parts |= {"acceptance": acceptance.mean(), "greedy": greedy.float().mean()}
    depth, right = rounds.depth[rounds.counts], (logits.detach().max(-1).indices == labels).float()
    agreement = torch.stack([right[depth == d].mean() for d in range(window)])  # NaN where there is none
    return Losses(total, parts, agreement)


def faked(plain: PreTrainedModel, shape: QatShape) -> tuple[nn.Module, Fakes]:
    """A second module tree over the model's tensors, whose linear layers that fit the format are fake-quantised.

    Raises `ConfigError` where none does, or where layers differ.
    """
    student, fakes = share_copy(plain), Fakes(_rounded(plain, shape))
    for layer, of_layer in zip(layers_of(cast("PreTrainedModel", student)), fakes.layers, strict=True):
        for name in fakes.config.linears:
            linear = cast("nn.Linear", layer.get_submodule(name))
            fake = FakeInt4Linear(linear, shape.group_size, shape.bits, shape.start, shape.train == "weights")
            cast("nn.ModuleDict", of_layer)[name.replace(".", "_")] = fake
            layer.set_submodule(name, fake)
    return student, fakes


def _rounded(plain: PreTrainedModel, shape: QatShape) -> Int4DraftConfig:
    """The linear layers that fit the format. Raises `ConfigError` where none does, or where layers differ."""
    every = [cast("Any", layer) for layer in layers_of(plain)]
    fits = [
        (name, size)
        for name, size in zip(*linears_of(plain, shape.linears), strict=True)
        if fits_int4(every[0].get_submodule(name), shape.group_size)
    ]
    if not fits:
        raise ConfigError(
            "no linear layer fits this format", got=f"head.group_size={shape.group_size}",
            expected="inputs in whole groups, outputs in sixteens", fix="smaller groups, or other head.linears",
        )  # fmt: skip
    for index, layer in enumerate(every):
        for name, (outputs, inputs) in fits:
            linear = layer.get_submodule(name)
            if (linear.out_features, linear.in_features) != (outputs, inputs):
                raise ConfigError(
                    f"{name} of layer {index} has another shape than that of layer 0",
                    got=(linear.out_features, linear.in_features), expected=(outputs, inputs),
                )  # fmt: skip
    names, sizes = zip(*fits, strict=True)
    return Int4DraftConfig(shape.bits, shape.group_size, len(every), names, sizes)
