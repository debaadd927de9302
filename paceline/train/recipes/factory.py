"""The module and the recipe that a configuration asks for, shaped after the target where it does not say."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ...heads.eagle import EagleHead
from ...heads.mtp import MtpHead
from ...heads.parallel import BlockwiseHead, MedusaHead
from ...heads.parts import frequent_ids
from ...heads.space import SpaceAdapter
from ...runner import LoadedModel
from ...zoo import resolve
from ..config import RunConfig
from ..data import Answers
from ..losses import Loss, loss_named
from ..recipe import Recipe
from .outline import (
    Facts,
    blockwise_config,
    check_head,
    eagle3_states,
    eagle_config,
    medusa_config,
    mtp_config,
    started,
)
from .shapes import (
    BlockwiseShape,
    EagleLoss,
    EagleShape,
    MedusaShape,
    MtpLoss,
    MtpShape,
    ParallelLoss,
    SpaceLoss,
    SpaceShape,
    loss_of,
    shape_of,
)

_T = TypeVar("_T")


def layers_of(method: str, config: RunConfig, target: LoadedModel) -> tuple[int, ...]:
    """Hidden states of the target that training reads, and `prepare` therefore keeps."""
    last = target.num_layers
    if method in ("space", "qat", "distill"):
        return ()
    if method != "eagle3":
        return (last,)
    return tuple(sorted({*eagle3_states(shape_of(EagleShape, config), target), last}))


def recipe_for(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    """A fresh module beside its target, in float32, and the recipe to train it.

    answers: those to train on; their most frequent tokens become the draft vocabulary. Raises as `check_head`.
    """
    check_head(method, config, target)
    return _MAKERS[method](method, config, target, answers)


def _eagle(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .eagle import EagleRecipe

    shape, how = shape_of(EagleShape, config), loss_of(EagleLoss, config)
    facts, version = Facts(target), 3 if method == "eagle3" else 1
    head_config = eagle_config(version, shape, target)
    ids = frequent_ids(answers.texts, head_config.draft_vocab_size, target.vocab_size)
    rows = target.output_rows().detach().float()
    if config.start is not None:
        head = started(method, config.start, EagleHead, target)
        ids = head.draft_ids
    else:
        head = _seeded(shape.seed, lambda: EagleHead(head_config, ids)).to(target.device)
        if version == 3 and facts.norm is not None:  # the output rows are the target's, so its final norm fits them
            head.norm.weight.data.copy_(facts.norm)
        if answers.has_states:
            _balance(head, facts.embeddings, answers)
    head.attach(facts.embeddings, rows)
    steps, regress, ce_weight, noise = how.as_paper(version)
    return EagleRecipe(
        head, rows[ids.to(rows.device)], target.num_layers, loss_named(how.name), steps, how.decay, regress, ce_weight,
        noise,
    )  # fmt: skip


def _parallel(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .heads import HeadsRecipe

    how = loss_of(ParallelLoss, config)
    if method == "medusa":
        medusa = shape_of(MedusaShape, config)
        shape = medusa_config(medusa, target)
        ids = frequent_ids(answers.texts, shape.draft_vocab_size, target.vocab_size)
        head: MedusaHead | BlockwiseHead = _seeded(medusa.seed, lambda: MedusaHead(shape, ids))
    else:
        blockwise = shape_of(BlockwiseShape, config)
        wide = blockwise_config(blockwise, target)
        ids = frequent_ids(answers.texts, wide.draft_vocab_size, target.vocab_size)
        head = _seeded(blockwise.seed, lambda: BlockwiseHead(wide, ids))
    rows = target.output_rows().detach().float()
    if config.start is not None:
        head = started(method, config.start, type(head), target)
        ids = head.draft_ids
    head.to(target.device).attach(Facts(target).embeddings, rows)
    decay = how.decay if how.decay is not None else 0.8 if method == "medusa" else 1.0
    return HeadsRecipe(head, rows[ids.to(rows.device)], _law(how.name), decay, how.one_head)


def _mtp(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .mtp import MtpRecipe

    shape, how = shape_of(MtpShape, config), loss_of(MtpLoss, config)
    head_config = mtp_config(shape, target)
    ids = frequent_ids(answers.texts, head_config.draft_vocab_size, target.vocab_size)
    head = _seeded(shape.seed, lambda: MtpHead(head_config, ids)).to(target.device)
    if config.start is not None:
        head = started(method, config.start, MtpHead, target)
        ids = head.draft_ids
    rows = target.output_rows().detach().float()
    head.attach(Facts(target).embeddings, rows)
    return MtpRecipe(head, rows[ids.to(rows.device)], _law(how.name), how.steps, how.decay)


def _space(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from . import space_model as models
    from . import space_shape as shapes
    from .space import SpaceRecipe

    shape, how = shape_of(SpaceShape, config), loss_of(SpaceLoss, config)
    gated = shape.mode == "gated"
    start = None if config.start is None else started(method, config.start, SpaceAdapter, target)
    plain = models.plain_model(resolve(config.model), target.device)
    made = shapes.config_of(shape, config.head, plain, target.vocab_size, start)
    build_model = models.with_factors if gated or shape.lora else models.whole
    trained = _seeded(shape.seed, lambda: build_model(plain, made, start))
    ids = None
    if how.vocab_size is not None:
        ids = frequent_ids(answers.texts, min(how.vocab_size, target.vocab_size), target.vocab_size)
    return SpaceRecipe(
        trained, gated, target.tokenizer, _law(how.name), how.rows, how.keep, how.decay, how.ar_weight, how.ar_share,
        ids, "none" if start is None else shapes.hash_of(start),
    )  # fmt: skip


def _qat(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .qat import qat_recipe

    return qat_recipe(config, target)


def _distill(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .distill import distill_recipe

    return distill_recipe(config, target)


def _law(name: str) -> Loss | None:
    """Loss between laws; "token" is cross entropy with the token that followed."""
    return None if name == "token" else loss_named(name)


@torch.no_grad()
def _balance(head: EagleHead, embeddings: Tensor, answers: Answers) -> None:
    """Scale the columns of `fc` so that whatever it joins comes in with mean square 1.

    States outweigh embeddings by far (in SmolLM2-135M 2 to 25 against 0.1, root mean square): a fresh head would hardly
    see the token it is given. The first column is left out, where some models keep values of another magnitude.
    """
    layers = head.config.states
    some = answers.batch(range(min(len(answers), 16)), layers, 1 << 30)
    seen = some.is_answer.roll(-1, 1)
    parts = [some.states[layer][seen].float() for layer in layers]
    if head.config.version == 1:
        parts.insert(0, embeddings[head.draft_ids.to(embeddings.device)].float())
    for part, columns in zip(parts, head.fc.weight.chunk(len(parts), 1), strict=True):
        columns /= part.square().mean().sqrt().to(columns.device)


_Maker = Callable[[str, RunConfig, LoadedModel, Answers], Recipe]
_MAKERS: dict[str, _Maker] = {
    "eagle": _eagle,
    "eagle3": _eagle,
    "medusa": _parallel,
    "blockwise": _parallel,
    "mtp": _mtp,
    "space": _space,
    "qat": _qat,
    "distill": _distill,
}


def _seeded(seed: int, make: Callable[[], _T]) -> _T:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
