"""SPACE's training (SAR-SFT, arXiv 2402.11809): mask tokens at many places of an answer at once.

    column        t          t+1        t+2        t+3          rows of the second pass, at an anchor t:
    token         x_t        x_{t+1}    x_{t+2}    x_{t+3}      mask 0 at t+1: label x_{t+2}, or its distribution
                                                                mask 1 at t+2: label x_{t+3}, or its distribution

The paper cuts an answer at a random place and appends k+1 masks, one group a pass; here `rows` mask tokens share a pass
as `Rounds`, each seeing the columns up to its own anchor and the masks before it in its own group. A layer with a
sliding window sees no further back, by position, than it will while drafting.

    gated   the plain model reads the text; the same tensors with low-rank factors read the mask tokens
    full    one model reads both; its answers are trained too (`ar_weight`), in some batches alone (`ar_share`, the
            paper's p_AR); the factors are merged into it in the end, or (`lora: false`) every weight is trained

Deep masks seldom matter, so a group keeps mask j with probability keep^j (conditional drop, as P-EAGLE, 2602.01469).
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ConfigError, IncompatibleModels
from ...hf.checkpoint import quietly
from ...hf.load import KV_CACHE
from ...schema import Text, checked
from ...target import LoadedModel, wrap_model
from ...target.adapters import share_copy
from ...train.config import AtLeast0, AtLeast1, Few, Seed, Several, Share
from ...train.data import Answers
from ...train.head_recipe import Decay, TokenLoss, seeded, shifted, started
from ...train.losses import LOSSES
from ...train.models import check_memory, layers_of, linears_of, outlined, plain_models, size_of, windows_of
from ...train.recipe import Batch, Losses, Plan, Recipe
from ...train.rounds import Rounds
from ...train.run_folder import check_same
from ..heads.parts import Rank, draft_index, frequent_ids, last_part
from .adapter import Factors, SpaceAdapter, SpaceConfig


@checked
class SpaceShape:
    """Shape of a SPACE adapter. mode: "gated" leaves the model as it is, "full" fine-tunes it.

    lora: train low-rank layers, not every weight. linears: where they act, by the last part of the name; empty:
    attention and MLP. The rest as in `SpaceConfig`.
    """

    mode: Literal["gated", "full"] = "gated"
    lora: bool = True
    num_masks: Few = 4
    shared_mask: bool = False
    rank: Rank = 16
    linears: Several[Text] = ()
    transition_rank: Rank = 64
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
    """How an adapter is trained.

    name: "token" is the paper's, the others distil. vocab_size: compare so many frequent tokens, which is faster; None:
    all. rows: mask tokens a pass. keep: see above. decay: mask j weighs decay^j. ar_weight, ar_share: of a full run.
    """

    name: TokenLoss = "ce"
    vocab_size: AtLeast1 | None = None
    rows: AtLeast1 = 512
    keep: Decay = 0.8
    decay: Decay = 0.8
    ar_weight: AtLeast0 = 1.0
    ar_share: Share = 0.5


# The models that are trained


@dataclass(frozen=True)
class Trained:
    """adapter: masks and factors. plain, adapted: the models of text and masks. module: what its checkpoints hold."""

    adapter: SpaceAdapter
    plain: PreTrainedModel
    adapted: PreTrainedModel
    module: nn.Module


def with_factors(plain: PreTrainedModel, config: SpaceConfig, start: SpaceAdapter | None) -> Trained:
    """The adapter's factors act on the linear layers of a second model over the same tensors.

    start: an adapter of this shape, or one without factors, which get theirs.
    """
    adapter, adapted = _fresh(plain, config), share_copy(plain)
    if start is not None:
        adapter.load_state_dict(start.state_dict(), strict=start.config.rank > 0)
    for linear, factors in _pairs(adapted, adapter):
        linear.register_forward_hook(lambda _, inputs, out, factors=factors: out + factors(inputs[0]))
    return Trained(adapter, plain, adapted, adapter)


def whole(plain: PreTrainedModel, config: SpaceConfig, start: SpaceAdapter | None) -> Trained:
    """Every weight of the model is trained, and the mask embeddings with it. Raises `ConfigError`."""
    if start is not None and start.config.rank:
        raise ConfigError(
            "start has low-rank factors, which cannot be used where every weight is trained",
            got=f"rank {start.config.rank}", expected="an adapter without factors", fix="head.lora=true",
        )  # fmt: skip
    adapter = start if start is not None else _fresh(plain, replace(config, rank=0, linears=(), shapes=()))
    model = plain.requires_grad_(True)
    return Trained(adapter, model, model, nn.ModuleDict({"adapter": adapter, "model": model}))


def _pairs(model: PreTrainedModel, adapter: SpaceAdapter) -> Iterator[tuple[nn.Linear, Factors]]:
    for index, layer in enumerate(layers_of(model)):
        for name in adapter.config.linears:
            yield cast("nn.Linear", layer.get_submodule(name)), adapter.factors(index, name)


@torch.no_grad()
def merge(trained: Trained) -> PreTrainedModel:
    """The fine-tuned model, with the factors in its weights."""
    model = copy.deepcopy(trained.plain)
    for linear, factors in _pairs(model, trained.adapter):
        linear.weight += factors.b @ factors.a
    return model


def without_factors(adapter: SpaceAdapter) -> SpaceAdapter:
    """Masks and transition alone: a fine-tuned model needs no more."""
    bare = SpaceAdapter(replace(adapter.config, rank=0, linears=(), shapes=()))
    bare.load_state_dict({name: t for name, t in adapter.state_dict().items() if not name.startswith("layers.")})
    return bare


def _fresh(plain: PreTrainedModel, config: SpaceConfig) -> SpaceAdapter:
    """Masks begin as the mean embedding with a little noise, which is near what the model has seen."""
    adapter = SpaceAdapter(config)
    embeddings = cast("torch.Tensor", cast("Any", plain.get_input_embeddings()).weight).detach()
    with torch.no_grad():
        spread = embeddings.std(0)
        adapter.masks.copy_(embeddings.mean(0) + 0.1 * torch.randn_like(adapter.masks).to(spread) * spread)
    return adapter.to(embeddings.device)


# The recipe


@final
class SpaceRecipe(Recipe):
    """Train a SPACE adapter, or the whole model with it.

    trained: the models that read text and masks. tokenizer: goes with a fine-tuned model. draft_ids: tokens whose
    logits are compared, which saves most of the output layer; None: all of them.
    Raises `ConfigError`.
    """

    KINDS: ClassVar = {"space": (SpaceShape, SpaceLoss)}
    states = ()

    def __init__(
        self, trained: Trained, gated: bool, tokenizer: PreTrainedTokenizerBase | None, settings: SpaceLoss,
        draft_ids: Tensor | None = None,
    ):  # fmt: skip
        self.module, self.adapter, self._trained, self._tokenizer = trained.module, trained.adapter, trained, tokenizer
        _check_rows(settings.rows, self.adapter.config)
        self._plain, self._adapted = trained.plain, trained.adapted
        self.gated, self.settings, self._loss = gated, settings, LOSSES.get(settings.name)
        vocab, device = self.adapter.config.vocab_size, trained.plain.device
        self._ids = None if draft_ids is None else draft_ids.to(device)
        self._windows = windows_of(trained.plain)
        self._index = draft_index(self._ids if self._ids is not None else torch.arange(vocab), vocab).to(device)

    @classmethod
    def check(cls, plan: Plan) -> None:
        shape, how, target = plan.shape, plan.settings, plan.target
        start = started(plan)
        transition = shape.transition_rank if start is None else start.config.transition_rank
        fixes = ["head.transition_rank=0"] * bool(transition)
        fixes += ["train.loss.vocab_size=null"] * (how.vocab_size is not None)
        if fixes:  # products with the output rows
            try:
                target.output_rows()
            except IncompatibleModels as error:
                fix = " and ".join(fixes)
                raise IncompatibleModels(error.what, got=error.got, expected=error.expected, fix=fix) from error
        config = config_of(plan, outlined(plan.config.model)[0], start)
        _check_rows(how.rows, config)
        check_memory(size_of(lambda: SpaceAdapter(config)), "this adapter", target.device, "smaller ranks in head.*")

    @classmethod
    def build(cls, plan: Plan, answers: Answers) -> Recipe:
        shape, how, target, gated = plan.shape, plan.settings, plan.target, plan.shape.mode == "gated"
        start = started(plan)
        plain = plain_models(plan.config.model, target.device)[0]
        config = config_of(plan, plain, start)
        trained = seeded(shape.seed, lambda: (with_factors if gated or shape.lora else whole)(plain, config, start))
        ids = None
        if how.vocab_size is not None:
            ids = frequent_ids(answers.texts, min(how.vocab_size, target.vocab_size), target.vocab_size)
        return cls(trained, gated, target.tokenizer, how, ids)

    @quietly()
    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        """The adapter; of a full run its masks alone, and the fine-tuned model, which is then the target."""
        if self.gated:
            return self.adapter, target
        tuned = cast("Any", merge(self._trained)).to(target.dtype)
        tuned.save_pretrained(model)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(model)
        return without_factors(self.adapter), wrap_model(tuned, self._tokenizer, f"{target.name}-tuned")

    def loss(self, batch: Batch) -> Losses:
        """Mean over the masks, weighted by decay^j; of a full run the loss of the text beside it."""
        ids, training, how = batch.token_ids, self.module.training, self.settings
        only_text = not self.gated and training and float(torch.rand(())) < how.ar_share
        cache = DynamicCache()
        with torch.set_grad_enabled(not self.gated and torch.is_grad_enabled()):
            reader = self._plain if self.gated else self._adapted
            text_logits = self._read(reader, self.gated, input_ids=ids, **{KV_CACHE: cache})
        parts, total = dict[str, Tensor](), text_logits.new_zeros(())
        if not self.gated:
            text = shifted(batch.is_answer, 1)
            total = nn.functional.cross_entropy(text_logits[text], shifted(ids, 1)[text])
            parts["text"], total = total.detach(), how.ar_weight * total
        if only_text:
            return Losses(total, parts, torch.full((self.adapter.num_masks,), float("nan"), device=ids.device))
        chance = None if training else torch.Generator().manual_seed(0)
        # Evaluation uses every mask, so that the shares of all depths come from the same anchors.
        groups = mask_groups(batch.is_answer, self.adapter.num_masks, how.rows, how.keep if training else 1.0, chance)
        masks = self._supervised(ids, groups, self._masked(ids, groups, cache), text_logits.detach())
        return Losses(total + masks.total, {**parts, **masks.parts}, masks.agreement)

    def _masked(self, ids: Tensor, groups: Rounds, cache: DynamicCache) -> Tensor:
        """Logits of the mask tokens, transition included. [B, R, V]."""
        embeds, places = self.adapter.embed(groups.depth * groups.counts), groups.column.clamp_min(0)
        logits = self._read(
            self._adapted, True, inputs_embeds=embeds, position_ids=places,
            attention_mask=groups.masks(ids.shape[1], self._windows, embeds.dtype), **{KV_CACHE: cache},
        )  # fmt: skip
        shift = self.adapter.shift(self._plain.get_input_embeddings()(ids.gather(1, places)).detach())
        return logits if shift is None else logits + nn.functional.linear(shift, self._rows())

    def _rows(self) -> Tensor:
        """Output rows of the tokens whose logits are compared, as they are now: a full run may train them. [Vd, E]."""
        every = cast("Any", self._plain.get_output_embeddings()).weight
        return every if self._ids is None else every[self._ids]

    def _read(self, model: nn.Module, drafts: bool, **inputs: object) -> Tensor:
        """Logits, of the draft vocabulary alone where there is one and `drafts` is set."""
        if self._ids is None or not drafts:
            return cast("Any", model)(use_cache=True, **inputs).logits
        states = cast("Any", model).base_model(use_cache=True, **inputs).last_hidden_state
        return nn.functional.linear(states, self._rows())

    def _supervised(self, ids: Tensor, groups: Rounds, logits: Tensor, text_logits: Tensor) -> Losses:
        """Losses of the mask tokens, from their logits [B, R, V] and those of the text [B, T, V]."""
        labels, mask = self._index[groups.take(ids, 1)], groups.depth[groups.counts]
        logits, teacher = logits[groups.counts], groups.take(text_logits)
        if self._ids is not None and teacher.shape[-1] != logits.shape[-1]:
            teacher = teacher[:, self._ids]
        right = (logits.detach().max(-1).indices == labels).float()  # a token that cannot be drafted is a miss
        parts, total, weight = dict[str, Tensor](), logits[:0].sum(), 0.0
        for j in range(self.adapter.num_masks):
            counts = (mask == j) & (labels >= 0)
            if not bool(counts.any()):
                continue
            said, wanted = logits[counts], labels[counts]
            value = (
                nn.functional.cross_entropy(said, wanted) if self._loss is None else self._loss(teacher[counts], said)
            )
            share = self.settings.decay**j * float(counts.sum())
            total, weight = total + share * value, weight + share
            parts[f"mask{j}"] = value.detach()
        agreement = torch.stack([right[mask == j].mean() for j in range(self.adapter.num_masks)])
        return Losses(total / max(weight, 1e-9), parts, agreement)


def mask_groups(is_answer: Tensor, num_masks: int, rows: int, keep: float, chance: torch.Generator | None) -> Rounds:
    """Groups of masks below random anchors until `rows` are used in all; chance: None for the global generator.

    A group is a round that starts behind its anchor. Behind an anchor at least two tokens of the answer follow, so that
    mask 0 has a label.
    """
    (batch, width), device = is_answer.shape, is_answer.device
    fits = shifted(is_answer, 1) & shifted(is_answer, 2)
    anchors = torch.rand(batch, width, generator=chance).to(device).masked_fill(~fits, -1.0).argsort(1, descending=True)
    kept = (torch.rand(batch, width, num_masks, generator=chance) < keep).to(device)
    kept[..., 0] = True
    start = (anchors + 1)[..., None].expand_as(kept)
    column = start + torch.arange(num_masks, device=device)
    last = (is_answer * torch.arange(width, device=device)).amax(1)  # of each answer
    # Mask j is there if those before it are, and a token of the answer follows.
    there = kept.cumprod(-1).bool() & fits.gather(1, anchors)[..., None] & (column < last[:, None, None])
    taken = there.flatten(1).int().argsort(stable=True, dim=1, descending=True)[:, : max(1, rows // batch)]
    column = column.where(there, -1).flatten(1).gather(1, taken)
    used = max(1, int((column >= 0).sum(1).max()))
    return Rounds.of(column[:, :used], start.flatten(1).gather(1, taken)[:, :used])


def _check_rows(rows: int, config: SpaceConfig) -> None:
    if rows < config.num_masks:
        raise ConfigError("train.loss.rows is too small", got=rows, expected=f"at least {config.num_masks} masks")


def config_of(plan: Plan, plain: PreTrainedModel, start: SpaceAdapter | None) -> SpaceConfig:
    """Shape of the adapter to train: the start's where there is one, with factors as the plan says if it has none.

    Raises `ConfigError` where the keys of `head` that the user wrote contradict the start.
    """
    shape = plan.shape
    if start is not None:
        _check_start(shape, plan.config.head, start.config)
        if start.config.rank:
            return start.config
    rank = shape.rank if shape.lora else 0
    linears, shapes = linears_of(plain, shape.linears) if rank else ((), ())
    if start is not None:
        return replace(start.config, rank=rank, linears=linears, shapes=shapes)
    text = plain.config.get_text_config()
    return SpaceConfig(
        int(text.hidden_size), int(text.num_hidden_layers), plan.target.vocab_size, shape.num_masks, shape.shared_mask,
        rank, linears, shapes, shape.transition_rank,
    )  # fmt: skip


def _check_start(shape: SpaceShape, head_keys: Mapping[str, object], start: SpaceConfig) -> None:
    names = ["num_masks", "shared_mask", "transition_rank", *["rank"] * bool(start.rank)]
    now = {f"head.{name}": getattr(shape, name) for name in names if name in head_keys}
    kept = {f"head.{name}": getattr(start, name) for name in names if name in head_keys}
    if start.rank and shape.linears and "linears" in head_keys:
        now["head.linears"] = sorted(map(last_part, shape.linears))
        kept["head.linears"] = sorted(map(last_part, start.linears))
    check_same("start", kept, now, "leave out these keys, or begin without start")
