"""The module and the recipe that a configuration asks for, shaped after the target where it does not say."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...drafters.eagle import output_rows
from ...errors import ConfigError
from ...heads import load_head
from ...heads.kinds import method_of
from ...modules.eagle import EagleConfig, EagleHead
from ...modules.heads import BlockwiseConfig, BlockwiseHead, MedusaConfig, MedusaHead
from ...modules.mtp import MtpConfig, MtpHead
from ...modules.space import SpaceAdapter
from ...modules.vocabulary import frequent_ids
from ...runner import LoadedModel
from ...zoo import resolve
from ..config import METHODS, RunConfig, build
from ..data import Answers
from ..losses import Loss, loss_named
from ..recipe import Recipe
from .shapes import EagleLoss, EagleShape, MtpLoss, MtpShape, ParallelLoss, ParallelShape, SpaceLoss, SpaceShape

_T = TypeVar("_T")
_M = TypeVar("_M", bound=nn.Module)


def layers_of(method: str, config: RunConfig, target: LoadedModel) -> tuple[int, ...]:
    """Hidden states of the target that training reads, and `prepare` therefore keeps."""
    last = target.num_layers
    if _checked(method) == "space":
        from .space_shape import check_rows

        head = build(SpaceShape, config.head, "head.")  # what cannot be trained is refused before answers are written
        check_rows(target, 0 if config.start else head.transition_rank, None)
        return ()
    if method in ("qat", "distill"):
        return ()
    if method != "eagle3":
        return (last,)
    shape = build(EagleShape, config.head, "head.")
    return tuple(sorted({*_eagle3_states(shape, target), last}))


def recipe_for(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    """A fresh module beside its target, in float32, and the recipe to train it.

    answers: those to train on; their most frequent tokens become the draft vocabulary. Raises `ConfigError` for keys
    of `head` or `train.loss` that this method does not know.
    """
    return _MAKERS[_checked(method)](method, config, target, answers)


def _eagle(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .eagle import EagleRecipe

    shape, how = build(EagleShape, config.head, "head."), build(EagleLoss, config.train.loss, "train.loss.")
    facts, version = _Facts(target), 3 if method == "eagle3" else 1
    head_config = EagleConfig(
        version=version,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or facts.intermediate_size,
        num_attention_heads=shape.num_attention_heads or facts.heads,
        num_key_value_heads=shape.num_key_value_heads or facts.kv_heads,
        head_dim=facts.head_dim,
        states=_eagle3_states(shape, target) if version == 3 else (target.num_layers,),
        draft_vocab_size=min(shape.draft_vocab_size, target.vocab_size),
        vocab_size=target.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        own_lm_head=shape.own_lm_head,
    )
    ids = frequent_ids(answers.texts, head_config.draft_vocab_size, target.vocab_size)
    rows = output_rows(target).detach().float()
    if config.start is not None:
        head = _started(method, config.start, EagleHead, target)
        ids = head.draft_ids
    else:
        head = _seeded(shape.seed, lambda: EagleHead(head_config, ids)).to(target.device)
        if version == 3 and facts.norm is not None:  # the output rows are the target's, so its final norm fits them
            head.norm.weight.data.copy_(facts.norm)
        if answers.has_states:
            _balance(head, facts.embeddings, answers)
    head.attach(facts.embeddings, rows)
    by_paper = (5, 0.0, 1.0, 0.0) if version == 3 else (1, 1.0, 0.1, 0.1)
    steps, regress, ce_weight, noise = (
        given if given is not None else default
        for given, default in zip((how.steps, how.regress, how.ce_weight, how.noise), by_paper, strict=True)
    )
    return EagleRecipe(
        head, rows[ids.to(rows.device)], target.num_layers, loss_named(how.name), int(steps), how.decay, regress,
        ce_weight, noise,
    )  # fmt: skip


def _parallel(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .heads import HeadsRecipe

    shape, how = build(ParallelShape, config.head, "head."), build(ParallelLoss, config.train.loss, "train.loss.")
    size, states = min(shape.draft_vocab_size, target.vocab_size), (target.num_layers,)
    ids = frequent_ids(answers.texts, size, target.vocab_size)
    if method == "medusa":
        medusa = MedusaConfig(
            target.hidden_size, shape.num_heads, states, size, target.vocab_size, shape.num_layers,
            own_lm_head=shape.own_lm_head,
        )  # fmt: skip
        head: MedusaHead | BlockwiseHead = _seeded(shape.seed, lambda: MedusaHead(medusa, ids))
    else:
        width = shape.intermediate_size or 4 * target.hidden_size
        wide = BlockwiseConfig(target.hidden_size, shape.num_heads, width, states, size, target.vocab_size)
        head = _seeded(shape.seed, lambda: BlockwiseHead(wide, ids))
    rows = output_rows(target).detach().float()
    if config.start is not None:
        head = _started(method, config.start, type(head), target)
        ids = head.draft_ids
    head.to(target.device).attach(_Facts(target).embeddings, rows)
    decay = how.decay if how.decay is not None else 0.8 if method == "medusa" else 1.0
    return HeadsRecipe(head, rows[ids.to(rows.device)], _law(how.name), decay, how.one_head)


def _mtp(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from .mtp import MtpRecipe

    shape, how = build(MtpShape, config.head, "head."), build(MtpLoss, config.train.loss, "train.loss.")
    facts, size = _Facts(target), min(shape.draft_vocab_size, target.vocab_size)
    ids = frequent_ids(answers.texts, size, target.vocab_size)
    head_config = MtpConfig(
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate_size or facts.intermediate_size,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        states=(target.num_layers,),
        draft_vocab_size=size,
        vocab_size=target.vocab_size,
        num_modules=shape.num_modules,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
    )
    head = _seeded(shape.seed, lambda: MtpHead(head_config, ids)).to(target.device)
    if config.start is not None:
        head = _started(method, config.start, MtpHead, target)
        ids = head.draft_ids
    rows = output_rows(target).detach().float()
    head.attach(facts.embeddings, rows)
    return MtpRecipe(head, rows[ids.to(rows.device)], _law(how.name), how.steps, how.decay)


def _space(method: str, config: RunConfig, target: LoadedModel, answers: Answers) -> Recipe:
    from . import space_model as models
    from . import space_shape as shapes
    from .space import SpaceRecipe

    shape, how = build(SpaceShape, config.head, "head."), build(SpaceLoss, config.train.loss, "train.loss.")
    gated = shape.mode == "gated"
    start = None if config.start is None else _started(method, config.start, SpaceAdapter, target)
    transition = shape.transition_rank if start is None else start.config.transition_rank
    shapes.check_rows(target, transition, how.vocab_size)
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


def _started(method: str, name: str, kind: type[_M], target: LoadedModel) -> _M:
    """The head to go on from, in float32. Raises `ConfigError` for one of another method."""
    head = load_head(name, target)
    if not isinstance(head, kind) or method_of(head) != method:
        raise ConfigError("start is a head of another method", got=f"{name!r}, {type(head).__name__}", expected=method)
    return head.float().to(target.device).requires_grad_(True)


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


class _Facts:
    """What of a target's configuration shapes a draft layer like its own."""

    def __init__(self, target: LoadedModel):
        config: Any = target.model.config.get_text_config()
        self.heads = int(getattr(config, "num_attention_heads", 8))
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self.head_dim = int(getattr(config, "head_dim", None) or target.hidden_size // self.heads)
        self.intermediate_size = int(getattr(config, "intermediate_size", None) or 4 * target.hidden_size)
        self.rms_norm_eps = float(getattr(config, "rms_norm_eps", None) or 1e-5)
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") if isinstance(rope, dict) else None
        self.rope_theta = float(theta or getattr(config, "rope_theta", None) or 10000.0)
        norm: Any = getattr(target.model.base_model, "norm", None)
        self.norm = cast("Tensor", norm.weight).detach() if isinstance(norm, nn.Module) else None
        self.embeddings = cast("Tensor", cast("Any", target.model.get_input_embeddings()).weight).detach()


def _eagle3_states(shape: EagleShape, target: LoadedModel) -> tuple[int, ...]:
    layers = target.num_layers
    middle = layers // 2
    states = shape.states or (min(2, layers // 3), middle, max(layers - 3, middle + 1))
    if not all(0 <= state <= layers for state in states):
        raise ConfigError("head.states names no state of the target", got=states, expected=f"0 to {layers}")
    return states


def _seeded(seed: int, make: Callable[[], _T]) -> _T:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _checked(method: str) -> str:
    if method not in _MAKERS:
        raise ConfigError("unknown method of training", got=repr(method), expected="one of " + ", ".join(METHODS))
    return method
