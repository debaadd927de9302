"""A small draft model learns to say what the target says (DistillSpec, arXiv 2310.08461).

The text is the target's own answers, and the lesson its whole law after each token, so that the loss is what drafting
loses: 1 - TV of samples stand (`losses`). With on_policy, the draft also samples rounds of its own from random places,
and the target says what it would have said after each of those tokens:

    column        t     t+1   t+2   t+3         text up to t: read by both, each with its own keys and values
    fed           x_t   y1    y2    y3          y drawn from the draft's law, without a gradient
    lesson        the target's law after each of them

What is written is an ordinary transformers folder, with the target's tokenizer, for `DraftModel`.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ...drafters.draft_model import check_same_tokenizer
from ...errors import ConfigError
from ...runner import LoadedModel
from ...zoo import resolve
from ..config import RunConfig, build
from ..losses import Loss, loss_named
from ..recipe import Batch, Losses, Recipe
from .qat import lessons
from .rounds import Rounds, drawn_rounds, read_rounds, read_text, rounds_of
from .shapes import DistillLoss, DistillShape
from .shared import shifted
from .space_model import layers_of_model, plain_model, windows_of


@final
class DistillRecipe(Recipe):
    """Train the causal language model `draft` against `plain`; either may have another layout of layers.

    loss: between the target's law and the draft's; None: cross entropy with the token that followed, which
    `label_weight` adds to any other loss. on_policy: weight of the rounds that the draft draws, against the text's;
    rounds: of `window` tokens, drawn in each text. Raises `ConfigError`.
    """

    states = ()

    def __init__(
        self,
        plain: PreTrainedModel,
        draft: PreTrainedModel,
        loss: Loss | None = None,
        label_weight: float = 0.0,
        on_policy: float = 0.0,
        window: int = 4,
        rounds: int = 8,
        identity: str = "",
    ):
        if not 0 <= on_policy <= 1 or window < 1 or rounds < 1:
            raise ConfigError(
                "the draft's own rounds are out of range", got=f"weight {on_policy}, {rounds} of {window} tokens",
                expected="a weight from 0 to 1, and at least one round of one token",
            )  # fmt: skip
        if on_policy and loss is None:
            raise ConfigError(
                "tokens that the draft draws are no labels", got="train.loss.name=token", fix="on_policy=0, or name=kl"
            )
        self.module, self._plain, self._draft = draft, plain, draft
        self._loss, self.label_weight, self.on_policy = loss, label_weight, on_policy
        self.window, self.rounds, self.identity = window, rounds, identity
        self._windows, self._own_windows = windows_of(plain), windows_of(draft)

    def loss(self, batch: Batch) -> Losses:
        """Mean over the answer tokens, and over the tokens that the draft drew."""
        ids = batch.token_ids
        first = int(shifted(batch.is_answer, 1).any(0).nonzero()[0])
        with torch.no_grad():
            taught, cache = read_text(self._plain, ids, first)
        said, own = read_text(self._draft, ids, first)
        rounds = rounds_of(batch.is_answer, 1, torch.zeros(len(ids), dtype=torch.long))
        told = lessons(
            rounds.take(said, -first), rounds.take(taught, -first), ids, rounds, self._loss, self.label_weight, 1
        )
        agreement = told.agreement.expand(self.window)  # a draft model reads the text alike at every depth
        if not self.on_policy or not self.module.training:
            return Losses(told.total, told.parts, agreement)
        drawn = drawn_rounds(batch.is_answer, self.window, self.rounds)
        fed = self._draw(ids, drawn, own)
        said = read_rounds(self._draft, fed, drawn, own, self._own_windows)[drawn.counts]
        with torch.no_grad():
            taught = read_rounds(self._plain, fed, drawn, cache, self._windows)[drawn.counts]
        assert self._loss is not None  # the constructor sees to it
        value = self._loss(taught, said)
        total = (1 - self.on_policy) * told.total + self.on_policy * value
        return Losses(total, {**told.parts, "drawn": value.detach()}, agreement)

    @torch.no_grad()
    def _draw(self, ids: Tensor, drawn: Rounds, cache: DynamicCache) -> Tensor:
        """Tokens [B, R] of rounds that the draft samples at temperature 1; the cache is left as it was."""
        width, every = int(cache.get_seq_length()), drawn.column.shape[1]
        fed = ids.gather(1, drawn.start.clamp_min(0))  # right where a round begins
        depth = (drawn.depth * drawn.counts)[..., None]
        for step in range(1, self.window):
            held = detached(cache)
            law = read_rounds(self._draft, fed, drawn, held, self._own_windows).softmax(-1)
            assert int(held.get_seq_length()) == width + every
            token = torch.multinomial(law.flatten(0, 1).float(), 1).view_as(fed)
            after = token.roll(1, 1)  # rows of a round stand side by side
            fed = torch.where(depth[..., 0] == step, after, fed)
        return fed


def detached(cache: DynamicCache) -> DynamicCache:
    """Another cache over the same keys and values."""
    made = DynamicCache()
    for index, layer in enumerate(cast("Any", cache).layers):
        made.update(layer.keys.detach(), layer.values.detach(), index)
    return made


def distill_recipe(config: RunConfig, target: LoadedModel) -> Recipe:
    """The recipe that a configuration asks for. Raises `ConfigError`; `IncompatibleModels` for another tokenizer."""
    shape, how = build(DistillShape, config.head, "head."), build(DistillLoss, config.train.loss, "train.loss.")
    plain = plain_model(resolve(config.model), target.device)
    begin = config.start or shape.model
    if begin is not None:
        if shape.num_layers is not None and config.start is None:
            raise ConfigError("head names a model and a number of layers", fix="leave out one of them")
        draft = plain_model(resolve(begin), target.device)
        check_same_tokenizer(target, replace(target, tokenizer=_tokenizer(begin), name=Path(begin).name))
    else:
        draft = fewer_layers(plain, shape.num_layers, shape.layers)
    draft.requires_grad_(True)
    if not shape.embeddings:
        for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            cast("nn.Module", module).requires_grad_(False)
    loss = None if how.name == "token" else loss_named(how.name)
    return DistillRecipe(
        plain, draft, loss, how.label_weight, how.on_policy, how.window, how.rounds, f"{shape} {how} from {begin}"
    )


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(folder))


def fewer_layers(plain: PreTrainedModel, count: int | None, which: str) -> PreTrainedModel:
    """A model of some layers of another, weights copied. count: None takes a quarter. Raises `ConfigError`.

    spaced, 3 of 7 layers:   0 . . 3 . . 6
    """
    total = len(layers_of_model(plain))
    count = max(1, total // 4) if count is None else count
    if not 1 <= count <= total:
        raise ConfigError("head.num_layers is out of range", got=count, expected=f"1 to {total}")
    steps = max(count - 1, 1)
    taken = list(range(count)) if which == "first" else [round(i * (total - 1) / steps) for i in range(count)]
    model: Any = copy.deepcopy(plain)
    config = model.config
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:  # one entry a layer, as layer_types
            setattr(config, key, [value[i] for i in taken])
    config.num_hidden_layers = count
    layers = layers_of_model(plain)
    old = [copy.deepcopy(layers[i]) for i in taken]
    for index, layer in enumerate(old):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                cast("Any", module).layer_idx = index
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            model.set_submodule(path, nn.ModuleList(old))
            break
    return model
