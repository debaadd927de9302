"""A small draft model learns to say what the target says (DistillSpec, arXiv 2310.08461).

The text is the target's own answers, and the lesson its whole law after each token, so that the loss is what drafting
loses: 1 - TV of samples stand (`losses`). With on_policy, the draft also samples rounds of its own from random places,
and the target says what it would have said after each of those tokens:

    column        t     t+1   t+2   t+3         text up to t: read by both, each with its own keys and values
    fed           x_t   y1    y2    y3          y drawn from the draft's law, without a gradient
    lesson        the target's law after each of them

Of a target that sees, the draft may see too, or read the text between the pictures, as `DraftModel` would have it
(`sighted`). Only its language model is trained.

What is written is an ordinary transformers folder, with the tokenizer or processor, for `DraftModel`.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from ...drafters.draft_model import check_same_tokenizer
from ...drafters.draft_vision import VisionMode
from ...errors import ConfigError, IncompatibleModels
from ...hf.load import load_processor
from ...hf.vision import text_half
from ...runner import LoadedModel, wrap_model
from ...zoo import resolve
from ..config import RunConfig
from ..losses import Loss, loss_named
from ..recipe import Batch, Losses, Recipe
from .outline import outlined
from .qat import lessons
from .rounds import Rounds, drawn_rounds, read_rounds, read_text, rounds_of
from .shapes import DistillLoss, DistillShape, loss_of, shape_of
from .sighted import Read, Reader, plain_halves
from .space_model import layers_of_model, windows_of


@final
class DistillRecipe(Recipe):
    """Train the causal language model `draft` against `plain`; either may have another layout of layers.

    loss: between the target's law and the draft's; None: cross entropy with the token that followed, which
    `label_weight` adds to any other loss. on_policy: weight of the rounds that the draft draws, against the text's;
    rounds: of `window` tokens, drawn in each text. reader: of a target that sees. whole: the model that `draft` is the
    language model of, which is written with `processor`. Raises `ConfigError`.
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
        reader: Reader | None = None,
        whole: PreTrainedModel | None = None,
        processor: ProcessorMixin | None = None,
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
        _check_sizes(draft, plain)
        self.module, self._plain, self._draft = draft, plain, draft
        self._reader, self.sees, self._whole, self.processor = reader, reader is not None, whole, processor
        self._loss, self.label_weight, self.on_policy = loss, label_weight, on_policy
        self.window, self.rounds, self.identity = window, rounds, identity
        self._windows, self._own_windows = windows_of(plain), windows_of(draft)

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        """The draft, with its tower where it has one."""
        return self._draft if self._whole is None else self._whole, target

    def loss(self, batch: Batch) -> Losses:
        """Mean over the answer tokens, and over the tokens that the draft drew."""
        text = own_text = Read(batch.token_ids, batch.is_answer)
        if self._reader is not None:
            text, own_text = self._reader.target(batch), self._reader.draft(batch)
        with torch.no_grad():
            taught, cache = read_text(self._plain, text.ids, text.first, text.rows, self._windows)
        said, own = read_text(self._draft, own_text.ids, own_text.first, own_text.rows, self._own_windows)
        ones = torch.zeros(len(text.ids), dtype=torch.long)
        rounds, mine = rounds_of(text.is_answer, 1, ones), rounds_of(own_text.is_answer, 1, ones)
        told = lessons(
            mine.take(said, -own_text.first), rounds.take(taught, -text.first), text.ids, rounds, self._loss,
            self.label_weight, 1,
        )  # fmt: skip
        agreement = told.agreement.expand(self.window)  # a draft model reads the text alike at every depth
        if not self.on_policy or not self.module.training:
            return Losses(told.total, told.parts, agreement)
        drawn = drawn_rounds(text.is_answer, self.window, self.rounds)
        mine = drawn.moved(own_text.begins - text.begins)
        fed = self._draw(own_text, mine, own)
        said = read_rounds(self._draft, fed, mine, own, self._own_windows, own_text.offsets)[mine.counts]
        with torch.no_grad():
            taught = read_rounds(self._plain, fed, drawn, cache, self._windows, text.offsets)[drawn.counts]
        assert self._loss is not None  # the constructor sees to it
        value = self._loss(taught, said)
        total = (1 - self.on_policy) * told.total + self.on_policy * value
        return Losses(total, {**told.parts, "drawn": value.detach()}, agreement)

    @torch.no_grad()
    def _draw(self, read: Read, drawn: Rounds, cache: DynamicCache) -> Tensor:
        """Tokens [B, R] of rounds that the draft samples at temperature 1; the cache is left as it was."""
        width, every = int(cache.get_seq_length()), drawn.column.shape[1]
        never = [] if self._reader is None else self._reader.banned_token_ids
        fed = read.ids.gather(1, drawn.start.clamp_min(0))  # right where a round begins
        depth = (drawn.depth * drawn.counts)[..., None]
        for step in range(1, self.window):
            held = detached(cache)
            law = read_rounds(self._draft, fed, drawn, held, self._own_windows, read.offsets).softmax(-1)
            law[..., never] = 0
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


def _check_sizes(draft: PreTrainedModel, plain: PreTrainedModel) -> None:
    sizes = [cast("Any", model).get_output_embeddings().weight.shape[0] for model in (draft, plain)]
    if sizes[0] != sizes[1]:
        raise IncompatibleModels(
            "the laws of draft and target have other sizes", got=f"{sizes[0]} tokens", expected=f"{sizes[1]}"
        )


def check_distill(config: RunConfig, target: LoadedModel) -> None:
    """Raise `ConfigError` for what a run asks in vain, and `IncompatibleModels` for another tokenizer."""
    shape = shape_of(DistillShape, config)
    loss_of(DistillLoss, config)
    if target.vision is None and shape.vision != "auto":
        raise ConfigError("this target reads text alone", got=f"head.vision={shape.vision}", fix="leave it out")
    begin = config.start or shape.model
    if begin is None:
        _count(outlined(resolve(config.model))[0], shape.num_layers)
        return
    draft, whole = outlined(resolve(begin))
    _check_sizes(draft, outlined(resolve(config.model))[0])
    if whole is not None and target.vision is None:
        raise ConfigError("the draft sees and its target does not", got=begin, fix="begin from a text model")
    check_same_tokenizer(target, replace(target, tokenizer=_tokenizer(begin), name=Path(begin).name))


def distill_recipe(config: RunConfig, target: LoadedModel) -> Recipe:
    """The recipe that a configuration asks for, which `check_distill` has seen. Raises `ConfigError`."""
    shape, how = shape_of(DistillShape, config), loss_of(DistillLoss, config)
    plain, seeing = plain_halves(resolve(config.model), target.device)
    begin, whole, processor, reader = config.start or shape.model, None, None, None
    if begin is not None:
        draft, whole = plain_halves(resolve(begin), target.device)
        processor = None if whole is None else load_processor(resolve(begin), whole.config)
    elif seeing is None or shape.vision == "none":
        draft = fewer_layers(plain, shape.num_layers, shape.layers)
    else:
        draft, whole = fewer_layers_of_whole(seeing, shape.num_layers, shape.layers)
        processor = None if target.vision is None else target.vision.processor
    if target.vision is not None:
        kind: VisionMode | None = "shared" if begin is None else None
        kind = kind if shape.vision == "auto" else shape.vision
        tokenizer = target.tokenizer if begin is None else _tokenizer(begin)
        loaded = wrap_model(whole or draft, tokenizer, processor=processor)
        reader = Reader(target, loaded, kind)
    draft.requires_grad_(True)
    if not shape.embeddings:
        for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            cast("nn.Module", module).requires_grad_(False)
    loss = None if how.name == "token" else loss_named(how.name)
    return DistillRecipe(
        plain, draft, loss, how.label_weight, how.on_policy, how.window, how.rounds, f"{shape} {how} from {begin}",
        reader, whole, processor,
    )  # fmt: skip


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(folder), trust_remote_code=False)


def fewer_layers(plain: PreTrainedModel, count: int | None, which: str) -> PreTrainedModel:
    """A model of some layers of another, weights copied. count: None takes a quarter. Raises `ConfigError`.

    spaced, 3 of 7 layers:   0 . . 3 . . 6
    """
    return _cut(copy.deepcopy(plain), count, which)


def fewer_layers_of_whole(
    whole: PreTrainedModel, count: int | None, which: str
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same of a model that sees: its language model, and the whole, whose tower and projector are copied."""
    made = copy.deepcopy(whole)
    text = _cut(text_half(made), count, which)
    cast("Any", made.config).text_config = text.config
    return text, made


def _cut(model: PreTrainedModel, count: int | None, which: str) -> PreTrainedModel:
    count, total = _count(model, count)
    steps = max(count - 1, 1)
    taken = list(range(count)) if which == "first" else [round(i * (total - 1) / steps) for i in range(count)]
    layers = layers_of_model(model)
    kept = nn.ModuleList(layers[i] for i in taken)
    config: Any = model.config.get_text_config()
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:  # one entry a layer, as layer_types
            setattr(config, key, [value[i] for i in taken])
    config.num_hidden_layers = count
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                cast("Any", module).layer_idx = index
    path = next(path for path, module in model.named_modules() if module is layers)
    model.set_submodule(path, kept)
    return model


def _count(model: PreTrainedModel, asked: int | None) -> tuple[int, int]:
    """Layers to keep, and all there are. asked: None: a quarter. Raises `ConfigError`."""
    total = len(layers_of_model(model))
    count = max(1, total // 4) if asked is None else asked
    if not 1 <= count <= total:
        raise ConfigError("head.num_layers is out of range", got=count, expected=f"1 to {total}")
    return count, total
