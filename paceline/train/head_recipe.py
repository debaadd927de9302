"""What several recipes share: labels and losses of a batch, attention of unrolled steps, and how heads are built."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields as of_fields
from itertools import cycle
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, final

import torch
from pydantic import Field
from torch import Tensor, nn

from ..errors import ConfigError
from ..methods.heads.folder import load_head
from ..methods.heads.info import head_class, method_of
from ..methods.heads.layers import attend_causally
from ..methods.heads.parts import draft_index, frequent_ids
from ..schema import checked
from ..target import LoadedModel
from .config import AtLeast1, Few, Seed, Several
from .data import Answers, online_states
from .losses import LOSSES, Loss, LossName
from .models import check_memory, size_of
from .recipe import Batch, Plan, Recipe

_T = TypeVar("_T")
TokenLoss = LossName | Literal["token"]
"""One of `losses`, or "token": the cross entropy with the token of the answer, without a teacher."""
Decay = Annotated[float, Field(gt=0, le=1)]


def shifted(x: Tensor, by: int) -> Tensor:
    """Shift columns left: column t gets the value of column t + by, the last ones 0 (False). [B, T, ...]."""
    out = torch.zeros_like(x)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


def seeded(seed: int, make: Callable[[], _T]) -> _T:
    """The result of `make` with this random seed; the random state of the process does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@final
class Labels:
    """The token `ahead` columns after each one, where the target wrote it and the head can draft it.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. states: the target's last [B, T, E]. index: the
    place of each target token in the draft vocabulary, or -1. loss: between distributions; None: cross entropy with
    the token itself. among: the only columns that count [B, T]; None: all.
    """

    def __init__(
        self, batch: Batch, states: Tensor, lm_head: Tensor, index: Tensor, loss: Loss | None,
        among: Tensor | None = None,
    ):  # fmt: skip
        self._batch, self._index, self._loss = batch, index, loss
        self._among = torch.ones_like(batch.is_answer) if among is None else among
        if loss is not None:  # the target's logits of every column whose next token is supervised, once for all steps
            supervised = shifted(batch.is_answer, 1)
            self._teacher = nn.functional.linear(states[supervised], lm_head)
            self._row = supervised.view(-1).cumsum(0).view(supervised.shape) - 1  # of `_teacher`, for each column

    def columns(self, ahead: int) -> Tensor:
        """Columns that have such a label. [B, T]."""
        label = self._index[shifted(self._batch.token_ids, ahead)]
        return self._among & shifted(self._batch.is_answer, ahead) & (label >= 0)

    def compare(self, logits: Tensor, columns: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Mean loss of logits [M, Vd], those of the columns, and their agreement (see `Losses`).

        The loss is zero where there are no columns. Tokens outside the draft vocabulary are misses. The agreement is
        NaN where the answers are too short.
        """
        labels = self._index[shifted(self._batch.token_ids, ahead)[columns]]
        right = (logits.detach().max(-1).indices == labels).sum()
        agreement = right / (self._among & shifted(self._batch.is_answer, ahead)).sum()
        if not len(logits):
            return logits.sum(), agreement
        if self._loss is None:
            return nn.functional.cross_entropy(logits, labels), agreement
        return self._loss(self._teacher[shifted(self._row, ahead - 1)[columns]], logits), agreement


@final
class Unrolled:
    """Attention of EAGLE-3's training-time test: step 0 is causal, each further step adds its own diagonal."""

    def __init__(self, length: int, device: torch.device, num_layers: int = 1):
        self._mask = torch.full((length, length), float("-inf"), device=device).triu(1)
        self._layers = cycle([(list[Tensor](), list[Tensor]()) for _ in range(num_layers)])  # keys and values by step

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, Hq, T, d], [B, H, T, d] -> [B, Hq, T, d]. Calls come in the order of the steps, and of their layers."""
        layer = next(self._layers)
        for held, new in zip(layer, (key, value), strict=True):
            held.append(new)
        if len(layer[0]) == 1:
            return attend_causally(query, key, value)
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        keys, values = ([x.repeat_interleave(groups, 1) for x in held] for held in layer)
        query = query * query.shape[-1] ** -0.5
        past = torch.baddbmm(self._mask.to(query.dtype), query.flatten(0, 1), keys[0].flatten(0, 1).transpose(1, 2))
        later = torch.stack([(query * k).sum(-1) for k in keys[1:]], -1)
        weights = torch.cat([past.view(*query.shape[:2], length, length), later], -1).softmax(-1)
        before, later = weights.split([length, len(keys) - 1], -1)
        out = before @ values[0]
        for step, held in enumerate(values[1:]):
            out = out + later[..., step, None] * held
        return out


def started(plan: Plan, *others: str) -> Any:
    """The head to continue from, of the plan's method or one of the others, in float32; None without `start`.

    It may have been trained for another target of the same sizes. Raises `ConfigError` for a head of another method.
    """
    name, methods = plan.config.start, (plan.method, *others)
    if name is None:
        return None
    head = load_head(name, plan.target, allow_other_target=True)
    if method_of(head) not in methods:
        got, expected = f"{name!r}, {type(head).__name__}", " or ".join(methods)
        raise ConfigError("start is a head of another method", got=got, expected=expected)
    return head.float().requires_grad_(True)


@checked
class HeadShape:
    """Shape of a head over the target's states."""

    draft_vocab_size: AtLeast1 = 8192
    seed: Seed = 0


@checked
class LayersShape(HeadShape):
    """Shape of a head of decoder layers. None, and no states: as the recipe of the method takes them of the target."""

    states: Several[Annotated[int, Field(ge=0)]] = ()
    intermediate_size: AtLeast1 | None = None
    num_attention_heads: Few | None = None
    num_key_value_heads: Few | None = None


def config_of(kind: type[_T], plan: Plan, **overrides: object) -> _T:
    """A head's configuration: fields as the shape says, where it does not as `overrides` does, or else the target's.

    Raises `ConfigError` for states that the target does not have.
    """
    target, config = plan.target, cast("Any", plan.target.model.config.get_text_config())
    heads, layers = int(getattr(config, "num_attention_heads", 8)), target.num_layers
    rope = getattr(config, "rope_parameters", None) or {}
    like = {
        "hidden_size": target.hidden_size,
        "states": (layers,),
        "vocab_size": target.vocab_size,
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * target.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or target.hidden_size // heads),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-5),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
    }
    asked = {key: value for key, value in vars(plan.shape).items() if value not in (None, ())}
    values: dict[str, Any] = {**like, **overrides, **asked}
    values["draft_vocab_size"] = min(plan.shape.draft_vocab_size, target.vocab_size)
    if max(values["states"]) > layers:
        got = list(values["states"])
        raise ConfigError("head.states names no state of the target", got=got, expected=f"0 to {layers}")
    return kind(**{field.name: values[field.name] for field in of_fields(cast("Any", kind)) if field.name in values})


def mask_token(plan: Plan) -> int:
    """The token of masks: what the shape says, or else the padding token, or the end of text."""
    padding = getattr(plan.target.tokenizer, "pad_token_id", None)
    usual = [plan.shape.mask_token_id, padding, *sorted(plan.target.eos_ids), 0]
    return next(token for token in usual if token is not None)


def state_samples(target: LoadedModel, answers: Answers, layers: Sequence[int]) -> Tensor:
    """States of the target from which it wrote some answers, [N, len(layers) E], in float32.

    The first column of the texts is left out, where some models keep values of another magnitude.
    """
    sample = answers.batch(range(min(len(answers), 16)), layers, 1 << 30)
    sample = sample if sample.states else online_states(target, sample, layers)
    states = torch.cat([sample.states[layer].float() for layer in layers], -1)
    return states[sample.is_answer.roll(-1, 1)]


class HeadRecipe(Recipe):
    """A recipe of heads over the target's states, which draft a vocabulary of frequent tokens.

    lm_head: the target's output rows for the draft vocabulary [Vd, E]. settings: what `train.loss` says. last: the
    index of the target's last state, from which the output rows make the labels.
    """

    learns_prompts: ClassVar[bool] = True
    STARTS: ClassVar[dict[str, dict[str, tuple[str, ...]]]] = {}
    """For each method, other methods whose heads it can start from, and the configuration fields to replace."""

    def __init__(self, module: Any, lm_head: Tensor, settings: Any, last: int):
        self.check_loss(module.config, settings)
        self.module = self.head = module
        self.settings, self._last = settings, last
        self._rows, self._loss = lm_head, LOSSES.get(settings.name)
        self._index = draft_index(module.draft_ids.to(lm_head.device), module.config.vocab_size)
        self.states = tuple(sorted({*module.config.states, last}))

    def labels(self, batch: Batch, among: Tensor | None = None) -> Labels:
        return Labels(batch, batch.states[self._last], self._rows, self._index, self._loss, among)

    def scale_inputs(self, weight: nn.Parameter, parts: Sequence[Tensor], is_fresh: bool) -> None:
        """Let a matrix learn, and if it is fresh begin, as one that reads every channel with mean square 1.

        parts: samples of what it reads, side by side, [N, channels] each.
        """
        scale = torch.cat([part.square().mean(0).sqrt().to(weight.device) for part in parts]).clamp(min=1e-3)
        self.input_scales = {weight: scale}
        if is_fresh:
            weight.div_(scale)

    @classmethod
    @abstractmethod
    def configure(cls, plan: Plan) -> Any:
        """The module's configuration; the target's sizes where the shape does not say. Raises `ConfigError`."""

    @classmethod
    def check_loss(cls, config: Any, settings: Any) -> None:
        """Raise `ConfigError` for settings of `train.loss` that cannot train a module of this configuration."""

    def initialise(self, target: LoadedModel, answers: Answers, is_fresh: bool) -> None:
        """Improve the random initial weights of an attached head. is_fresh: it has no `start`."""

    @classmethod
    def layers(cls, plan: Plan) -> tuple[int, ...]:
        return tuple(sorted({*cls.configure(plan).states, plan.target.num_layers}))

    @classmethod
    def check(cls, plan: Plan) -> None:
        config = cls.configure(plan)
        plan.target.output_rows()
        if plan.config.start is None:
            size = size_of(lambda: head_class(plan.method)(config))
            check_memory(size, "this head", plan.target.device, "smaller sizes in head.*")
        else:
            config = cls.continued(plan, config).config
        cls.check_loss(config, plan.settings)

    @classmethod
    def build(cls, plan: Plan, answers: Answers) -> Recipe:
        target, config = plan.target, cls.configure(plan)
        ids = frequent_ids(answers.texts, config.draft_vocab_size, target.vocab_size)
        if plan.config.start is None:
            head = seeded(plan.shape.seed, lambda: head_class(plan.method)(config, ids)).to(target.device)
        else:
            head = cls.continued(plan, config, ids)
            ids = head.draft_ids
        rows = target.output_rows().detach().float()
        head.attach(target.embeddings.detach(), rows)
        recipe = cls(head, rows[ids.to(rows.device)], plan.settings, target.num_layers)
        recipe.initialise(target, answers, plan.config.start is None)
        return recipe

    @classmethod
    def continued(cls, plan: Plan, config: Any, ids: Tensor | None = None) -> Any:
        """The head of `start`, with fields of `config` where the method differs.

        ids: a new draft vocabulary, if the configuration sets its size.
        """
        others = cls.STARTS.get(plan.method, {})
        head = started(plan, *others)
        fields = others.get(method_of(head), ())
        # Without output rows of its own a head drafts whatever rows it is given.
        if ids is not None and "draft_vocab_size" in plan.config.head and not head.owns_rows:
            fields = (*fields, "draft_vocab_size")
        else:
            ids = head.draft_ids
        if not fields:
            return head
        weights, kind = head.state_dict(), head_class(plan.method)
        same = {field.name: getattr(head.config, field.name) for field in of_fields(head.config)}
        same |= {name: getattr(config, name) for name in fields}
        head = seeded(plan.shape.seed, lambda: kind(kind.Config(**same), ids)).to(plan.target.device)
        head.load_state_dict(head.state_dict() | weights | {"draft_ids": ids})
        return head
