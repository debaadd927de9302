"""A small draft model learns the target's distributions (DistillSpec, arXiv 2310.08461).

The draft learns the target's whole distribution after each token of the target's own answers, since a share 1 - TV of
its samples is accepted (`losses`). With on_policy, the draft also samples rounds from random places, and learns the
target's distribution after each of those tokens:

    column        t     t+1   t+2   t+3         text up to t: read by both, each with its own keys and values
    fed           x_t   y1    y2    y3          y drawn from the draft's distribution, without a gradient
    teacher       the target's distribution after each of them

Of a target that reads images, the draft may read them too, or the text between them, as `DraftModel` would (`images`).
Only its language model is trained.

The result is an ordinary transformers folder, with the tokenizer or processor, for `DraftModel`.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, final

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from ...errors import ConfigError, IncompatibleModels
from ...hf.halves import text_half
from ...hf.processors import load_processor
from ...hf.vision import is_vlm
from ...schema import checked
from ...target import LoadedModel, wrap_model
from ...train.config import AtLeast0, AtLeast1, Few, Name
from ...train.data import Answers
from ...train.head_recipe import TokenLoss
from ...train.images import BatchReader, ModelInput
from ...train.losses import LOSSES
from ...train.models import layers_of, outlined, plain_models, windows_of
from ...train.recipe import Batch, Losses, Plan, Recipe
from ...train.rounds import Rounds, drawn_rounds, read_rounds, read_text, rounds_of
from ...zoo import resolve
from ..self_int4.recipe import round_losses
from .drafter import check_same_tokenizer
from .vision import VisionMode


@checked
class DistillShape:
    """The small model. model: a folder or name to begin from; None: `num_layers` of the target's own layers.

    layers: which ones, "spaced" from the first to the last, or the "first" ones. embeddings: train them too. vision:
    what it reads of images, as `DraftModel`'s; auto: "shared" for layers of the target's own, else as there.
    """

    model: Name | None = None
    num_layers: AtLeast1 | None = None
    layers: Literal["spaced", "first"] = "spaced"
    embeddings: bool = False
    vision: Literal["auto", "own", "shared", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.model is not None and self.num_layers is not None:
            raise ConfigError("head names a model and a number of layers", fix="leave out one of them")


@checked
class DistillLoss:
    """How the draft is trained.

    label_weight: of the "token" loss, which is added to another one. on_policy: the weight of rounds that the draft
    samples, against the text's. rounds: how many are sampled in each text, of `window` tokens.
    """

    name: TokenLoss = "kl"
    label_weight: AtLeast0 = 0.0
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    window: Few = 4
    rounds: AtLeast1 = 8

    def __post_init__(self) -> None:
        if self.on_policy and self.name == "token":
            raise ConfigError(
                "tokens that the draft samples are not labels",
                got="train.loss.name=token",
                fix="on_policy=0, or name=kl",
            )


@final
class DistillRecipe(Recipe):
    """Train the causal language model `draft` against `plain`; either may have another layout of layers.

    reader: of a target that reads images. whole: the model that `draft` is the language model of, which is written with
    `processor`. Raises `IncompatibleModels`.
    """

    KINDS: ClassVar = {"distill": (DistillShape, DistillLoss)}
    states = ()
    makes_draft: ClassVar[bool] = True

    def __init__(
        self, plain: PreTrainedModel, draft: PreTrainedModel, settings: DistillLoss,
        reader: BatchReader | None = None, whole: PreTrainedModel | None = None,
        processor: ProcessorMixin | None = None,
    ):  # fmt: skip
        _check_sizes(draft, plain)
        self.module, self._plain, self._draft, self._whole = draft, plain, draft, whole
        self.settings, self._loss = settings, LOSSES.get(settings.name)
        self.processor = processor
        self._reader, self.reads_images = reader, reader is not None
        self._windows, self._own_windows = windows_of(plain), windows_of(draft)

    @classmethod
    def check(cls, plan: Plan) -> None:
        config, shape, target = plan.config, plan.shape, plan.target
        if target.vision is None and shape.vision != "auto":
            raise ConfigError("this target reads text alone", got=f"head.vision={shape.vision}", fix="leave it out")
        begin, plain = config.start or shape.model, outlined(config.model)[0]
        if begin is None:
            _count(plain, shape.num_layers)
            return
        draft, whole = outlined(begin)
        _check_sizes(draft, plain)
        if whole is not None and target.vision is None:
            raise ConfigError("the draft reads images and its target does not", got=begin, fix="use a text model")
        check_same_tokenizer(target, replace(target, tokenizer=_tokenizer(begin), name=Path(begin).name))

    @classmethod
    def build(cls, plan: Plan, answers: Answers) -> Recipe:
        config, shape, target = plan.config, plan.shape, plan.target
        plain, target_whole = plain_models(config.model, target.device)
        begin, whole, processor, reader = config.start or shape.model, None, None, None
        if begin is not None:
            draft, whole = plain_models(begin, target.device)
            processor = None if whole is None else load_processor(resolve(begin), whole.config)
        elif target_whole is None or shape.vision == "none":
            draft = fewer_layers(plain, shape.num_layers, shape.layers)
        else:
            whole = fewer_layers(target_whole, shape.num_layers, shape.layers)
            draft, processor = text_half(whole), None if target.vision is None else target.vision.processor
        if target.vision is not None:
            usual: VisionMode | None = "shared" if begin is None else None
            tokenizer = target.tokenizer if begin is None else _tokenizer(begin)
            loaded = wrap_model(whole or draft, tokenizer, processor=processor)
            reader = BatchReader(target, loaded, usual if shape.vision == "auto" else shape.vision)
        draft.requires_grad_(True)
        if not shape.embeddings:
            for module in (draft.get_input_embeddings(), draft.get_output_embeddings()):
                cast("nn.Module", module).requires_grad_(False)
        return cls(plain, draft, plan.settings, reader, whole, processor)

    def result(self, target: LoadedModel, model: Path) -> tuple[nn.Module, LoadedModel]:
        return self._draft if self._whole is None else self._whole, target

    def loss(self, batch: Batch) -> Losses:
        """Mean over the answer tokens, and over the tokens that the draft drew."""
        how, text = self.settings, ModelInput(batch.token_ids, batch.is_answer)
        own_text = text
        if self._reader is not None:
            text, own_text = self._reader.target(batch), self._reader.draft(batch)
        with torch.no_grad():
            teacher, cache = read_text(self._plain, text, self._windows)
        logits, own_cache = read_text(self._draft, own_text, self._own_windows)
        rounds, own_rounds = rounds_of(text.is_answer, 1), rounds_of(own_text.is_answer, 1)
        of_text = round_losses(
            own_rounds.take(logits, -own_text.first), rounds.take(teacher, -text.first), text.ids, rounds, self._loss,
            how.label_weight, 1,
        )  # fmt: skip
        agreement = of_text.agreement.expand(how.window)  # a draft model reads the text alike at every depth
        if not how.on_policy or not self.module.training:
            return Losses(of_text.total, of_text.parts, agreement)
        drawn = drawn_rounds(text.is_answer, how.window, how.rounds)
        own_drawn = drawn.moved(own_text.begins - text.begins)
        fed = self._draw(own_text, own_drawn, own_cache)
        logits = read_rounds(self._draft, fed, own_drawn, own_text, own_cache, self._own_windows)
        with torch.no_grad():
            teacher = read_rounds(self._plain, fed, drawn, text, cache, self._windows)
        assert self._loss is not None  # the settings see to it
        value = self._loss(teacher[drawn.counts], logits[own_drawn.counts])
        total = (1 - how.on_policy) * of_text.total + how.on_policy * value
        return Losses(total, {**of_text.parts, "drawn": value.detach()}, agreement)

    @torch.no_grad()
    def _draw(self, text: ModelInput, drawn: Rounds, cache: DynamicCache) -> Tensor:
        """Tokens [B, R] of rounds that the draft samples at temperature 1; the cache is left as it was."""
        never = [] if self._reader is None else self._reader.banned_token_ids
        fed = text.ids.gather(1, drawn.start.clamp_min(0))  # right where a round begins
        for step in range(1, self.settings.window):
            probs = read_rounds(self._draft, fed, drawn, text, detached(cache), self._own_windows).softmax(-1)
            probs[..., never] = 0
            token = torch.multinomial(probs.flatten(0, 1).float(), 1).view_as(fed)
            after = token.roll(1, 1)  # rows of a round are side by side
            fed = after.where((drawn.depth == step) & drawn.counts, fed)
        return fed


def detached(cache: DynamicCache) -> DynamicCache:
    """Another cache over the same keys and values."""
    copied = DynamicCache()
    for index, layer in enumerate(cast("Any", cache).layers):
        copied.update(layer.keys.detach(), layer.values.detach(), index)
    return copied


def _check_sizes(draft: PreTrainedModel, plain: PreTrainedModel) -> None:
    got, expected = (int(cast("Any", model.get_output_embeddings()).weight.shape[0]) for model in (draft, plain))
    if got != expected:
        raise IncompatibleModels("the output layers of draft and target have other sizes", got=got, expected=expected)


def _tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(resolve(folder), trust_remote_code=False)


def fewer_layers(model: PreTrainedModel, count: int | None, which: str) -> PreTrainedModel:
    """A copy of a model with some of its decoder layers. count: None takes a quarter. Raises `ConfigError`.

    spaced, 3 of 7 layers:   0 . . 3 . . 6
    """
    shorter: Any = copy.deepcopy(model)
    text = text_half(shorter) if is_vlm(shorter.config) else shorter
    count, total = _count(text, count)
    steps = max(count - 1, 1)
    taken = list(range(count)) if which == "first" else [round(i * (total - 1) / steps) for i in range(count)]
    layers = layers_of(text)
    kept = nn.ModuleList(layers[i] for i in taken)
    config: Any = text.config.get_text_config()
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == total:  # one entry a layer, as layer_types
            setattr(config, key, [value[i] for i in taken])
    config.num_hidden_layers = count
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                cast("Any", module).layer_idx = index
    path = next(path for path, module in text.named_modules() if module is layers)
    text.set_submodule(path, kept)
    if text is not shorter:
        shorter.config.text_config = text.config
    return shorter


def _count(model: PreTrainedModel, asked: int | None) -> tuple[int, int]:
    """Layers to keep, and all there are. asked: None: a quarter. Raises `ConfigError`."""
    total = len(layers_of(model))
    count = max(1, total // 4) if asked is None else asked
    if not 1 <= count <= total:
        raise ConfigError("head.num_layers is out of range", got=count, expected=f"1 to {total}")
    return count, total
