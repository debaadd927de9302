"""Quantisation-aware training of the self-draft: the target's own layers in a few bits learn to say what it says.

Teacher and student are one model; the student's linear layers are `FakeInt4Linear`. As when it drafts, the student
reads the target's keys and values of the committed text and only its own of the tokens of the round (`rounds`), so
that it learns what the shared cache leaves it to do. context="own" trains it as a model by itself instead.

Of a target that sees, its text half is trained, on the features that its tower makes of each prompt's pictures: they
are in the cache that the student reads, as when it drafts.

The lesson is the target's whole law after each answer token (`losses`: 1 - TV is the share of drafts that stand), or
the token that the target wrote ("token": training by labels). What is written is the rounded draft, not the weights
that were trained: codes and grids, 4.5 bits a weight with 4 bits in groups of 32 (`heads.int4_draft`).
"""

from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ConfigError
from ...heads.int4_draft import Int4Draft, Int4DraftConfig
from ...quant import Int4Linear
from ...quant.fake import FakeInt4Linear
from ...runner import LoadedModel
from ...runner.adapters import share_copy
from ...zoo import resolve
from ..config import RunConfig
from ..extras import need
from ..losses import Loss, compared, loss_named
from ..recipe import Batch, Losses, Recipe
from .outline import outlined
from .rounds import Rounds, read_rounds, read_text, rounds_of
from .shapes import QatLoss, QatShape, loss_of, shape_of
from .sighted import Read, Reader, plain_halves
from .space_model import layers_of_model, linears_of, windows_of


@final
class Fakes(nn.Module):
    """The fake-quantised layers of a student, by layer and name."""

    def __init__(self, config: Int4DraftConfig, layers: list[dict[str, FakeInt4Linear]]):
        super().__init__()
        self.config = config
        self._made = layers
        self.layers = nn.ModuleList(
            nn.ModuleDict({name.replace(".", "_"): fake for name, fake in of.items()}) for of in layers
        )

    def packed(self) -> Int4Draft:
        """What they have become, as codes and grids."""
        draft = Int4Draft(self.config)
        for index, of in enumerate(self._made):
            for name, fake in of.items():
                draft.put(index, name, *(t.cpu() for t in fake.packable()))
        return draft


@final
class QatRecipe(Recipe):
    """Train fake-quantised layers of `student` against `plain`.

    window: tokens of a round; in training rounds begin at random places. loss: between the target's law and the
    draft's; None: cross entropy with the token that followed, which `label_weight` adds to any other loss. reader: of
    a target that sees.
    """

    states = ()

    def __init__(
        self,
        plain: PreTrainedModel,
        student: nn.Module,
        fakes: Fakes,
        loss: Loss | None = None,
        label_weight: float = 0.0,
        window: int = 4,
        context: Literal["target", "own"] = "target",
        identity: str = "",
        reader: Reader | None = None,
    ):
        if window < 1:
            raise ConfigError("a round drafts nothing", got=f"window {window}", expected=">= 1")
        self.module, self._plain, self._student = fakes, plain, student
        self._loss, self.label_weight, self.window, self.context = loss, label_weight, window, context
        self._windows = windows_of(plain)
        self.identity, self._reader, self.sees = identity, reader, reader is not None

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        """The rounded draft."""
        return cast("Fakes", self.module).packed(), target

    def loss(self, batch: Batch) -> Losses:
        """Mean over the answer tokens; agreement by their place in a round."""
        read = Read(batch.token_ids, batch.is_answer) if self._reader is None else self._reader.target(batch)
        ids, first, windows = read.ids, read.first, self._windows
        with torch.no_grad():
            taught, cache = read_text(self._plain, ids, first, read.rows, windows)
        phases = torch.zeros(len(ids), dtype=torch.long)
        if self.module.training:
            phases = torch.randint(self.window, (len(ids),))
        rounds = rounds_of(batch.is_answer, self.window, phases)
        if self.context == "target":
            fed = ids.gather(1, rounds.column.clamp_min(0))
            said = read_rounds(self._student, fed, rounds, cache, windows, read.offsets)[rounds.counts]
        else:
            said = rounds.take(read_text(self._student, ids, first, read.rows, windows)[0], -first)
        return lessons(said, rounds.take(taught, -first), ids, rounds, self._loss, self.label_weight, self.window)


def lessons(
    said: Tensor, taught: Tensor, ids: Tensor, rounds: Rounds, loss: Loss | None, label_weight: float, window: int
) -> Losses:
    """Losses of the draft's logits against the target's, both [M, V] at the rows that count."""
    labels = rounds.take(ids, 1)
    parts, total = dict[str, Tensor](), said.new_zeros(())
    if loss is not None:
        total = loss(taught, said)
        parts["law"] = total.detach()
    if loss is None or label_weight:
        token = nn.functional.cross_entropy(said, labels)
        parts["token"] = token.detach()
        total = total + (label_weight if loss is not None else 1.0) * token
    acceptance, greedy = compared(taught, said.detach())
    parts |= {"acceptance": acceptance.mean(), "greedy": greedy.float().mean()}
    depth, right = rounds.depth[rounds.counts], (said.detach().argmax(-1) == labels).float()
    at = [right[depth == d] for d in range(window)]
    agreement = torch.stack([of.mean() if len(of) else right.new_full((), float("nan")) for of in at])
    return Losses(total, parts, agreement)


def check_qat(config: RunConfig) -> None:
    """Raise `ConfigError` for what a run asks in vain."""
    need("torchao", "QAT")
    shape = shape_of(QatShape, config)
    loss_of(QatLoss, config)
    if config.start is not None:
        raise ConfigError("QAT begins from the target's weights", got=f"start {config.start!r}", fix="leave it out")
    _rounded(outlined(resolve(config.model))[0], shape)


def qat_recipe(config: RunConfig, target: LoadedModel) -> Recipe:
    """The recipe that a configuration asks for, which `check_qat` has seen."""
    shape, how = shape_of(QatShape, config), loss_of(QatLoss, config)
    plain, _ = plain_halves(resolve(config.model), target.device)
    reader = None if target.vision is None else Reader(target)
    student, fakes = faked(plain, shape)
    loss = None if how.name == "token" else loss_named(how.name)
    identity = f"{shape} {how}"
    return QatRecipe(plain, student, fakes, loss, how.label_weight, how.window, how.context, identity, reader)


def faked(plain: PreTrainedModel, shape: QatShape) -> tuple[nn.Module, Fakes]:
    """A second module tree over the model's tensors, whose linear layers that fit the format are fake-quantised.

    Raises `ConfigError` where none does, or where layers differ.
    """
    student, chosen = share_copy(plain), _rounded(plain, shape)
    made = list[dict[str, FakeInt4Linear]]()
    for layer in (cast("Any", layer) for layer in layers_of_model(cast("PreTrainedModel", student))):
        made.append({})
        for name in chosen.linears:
            linear = layer.get_submodule(name)
            fake = FakeInt4Linear(linear, shape.group_size, shape.bits, shape.start, shape.train == "weights")
            made[-1][name] = fake
            layer.set_submodule(name, fake)
    return student, Fakes(chosen, made)


def _rounded(plain: PreTrainedModel, shape: QatShape) -> Int4DraftConfig:
    """The linear layers that fit the format. Raises `ConfigError` where none does, or where layers differ."""
    every = [cast("Any", layer) for layer in layers_of_model(plain)]
    fits = [
        (name, size)
        for name, size in zip(*linears_of(plain, shape.linears), strict=True)
        if Int4Linear.fits(every[0].get_submodule(name), shape.group_size)
        and size[0] % 16 == 0  # what ATen's kernels need, since the draft may be used on another device
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
    return Int4DraftConfig(
        shape.bits, shape.group_size, len(every), tuple(name for name, _ in fits), tuple(size for _, size in fits)
    )
