"""What models read of texts whose prompts may hold pictures: the runner's own reading, for many texts side by side.

    target    text  <i> <i> <i> <i>  text  answer          <i>: features of its tower
    draft     text  text  answer                           what its `drafters.draft_vision` makes of the same prompt

Towers and projectors are frozen and each picture is looked at once; only language models are trained.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from ...attention.masks import PromptRows
from ...core.request import SamplingParams, Sequence
from ...core.vision import VisionPrompt
from ...drafters.draft_vision import VisionMode, vision_of_draft
from ...errors import ConfigError
from ...hf.vision import BoundedCache, Features, is_vlm, text_half
from ...runner import LoadedModel, ModelRunner
from ...runner.prefill import prompt_rows
from ..prepare import prompt_vision
from ..recipe import Batch
from .space_model import plain_model

_KEPT = 256 << 20  # bytes of what processors made


@dataclass(frozen=True, eq=False)
class Rows:
    """Texts as a language model reads them in the place of token ids.

    features: of all pictures, one after another [M, E], which go where is_image [B, T]. deep: the same for the first
    layers, [M, E] each. positions: [B, T], or [A, B, T] on axes. offsets: of text behind the prompt, position - column
    [B]. both_ways: columns that see one another in both directions [B, T, T], whatever the window with cross_window.
    """

    features: Tensor
    is_image: Tensor
    deep: tuple[Tensor, ...]
    positions: Tensor
    offsets: Tensor
    both_ways: Tensor
    cross_window: bool

    def inputs(self, model: nn.Module, ids: Tensor) -> dict[str, object]:
        """Keywords for a language model: its own embeddings of the words among `ids` [B, T], positions, features."""
        embeddings = cast("Any", model).get_input_embeddings()
        embeds = embeddings(ids.masked_fill(self.is_image, 0))  # placeholders may have no embedding
        embeds = embeds.masked_scatter(self.is_image[..., None], self.features.to(embeds))
        given: dict[str, object] = {"inputs_embeds": embeds, "position_ids": self.positions}
        if self.deep:
            given["visual_pos_masks"] = self.is_image
            given["deepstack_visual_embeds"] = [part.to(embeds) for part in self.deep]
        return given


@dataclass(frozen=True, eq=False)
class Read:
    """Texts as one model reads them, [B, T]. rows: None for a model that never sees."""

    ids: Tensor
    is_answer: Tensor
    rows: Rows | None = None

    @property
    def first(self) -> int:
        """The first column behind which some answer's token stands."""
        return int(self.is_answer.any(0).nonzero()[0]) - 1

    @property
    def begins(self) -> Tensor:
        """Column of each answer's first token. [B]."""
        return self.is_answer.long().argmax(1)

    @property
    def offsets(self) -> Tensor | None:
        """Position - column of the answers' tokens. [B]; None: nothing."""
        return None if self.rows is None else self.rows.offsets


@final
class Reader:
    """Reads batches as a target that sees does, and as its draft does. draft, vision: as `DraftModel`'s."""

    def __init__(self, target: LoadedModel, draft: LoadedModel | None = None, vision: VisionMode | None = None):
        self._target = ModelRunner(target, 1)
        self._seen: BoundedCache[tuple[str, tuple[int, ...]], VisionPrompt] = BoundedCache(_KEPT, _bytes_of)
        self._vision = None if draft is None else vision_of_draft(vision, self._target, draft)
        self._draft = None if self._vision is None else ModelRunner(self._vision.loaded, 1)

    @property
    def banned_token_ids(self) -> list[int]:
        """Tokens that stand for pictures."""
        own = frozenset[int]() if self._draft is None else self._draft.banned_token_ids
        return sorted(self._target.banned_token_ids | own)

    def target(self, batch: Batch) -> Read:
        """What the target reads."""
        seqs = self._sequences(batch)
        texts = [ids[:n].tolist() for ids, n in zip(batch.token_ids, _ends(batch), strict=True)]
        return Read(batch.token_ids, batch.is_answer, _rows(self._target, texts, [seq.vision for seq in seqs], batch))

    def draft(self, batch: Batch) -> Read:
        """What the draft reads: prompts may be of another length, answers are the same."""
        assert self._vision is not None
        assert self._draft is not None
        readings = [self._vision.read(seq, self._draft) for seq in self._sequences(batch)]
        answers = [ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.is_answer, strict=True)]
        texts = [one.prompt + answer for one, answer in zip(readings, answers, strict=True)]
        ids = batch.token_ids.new_zeros(len(texts), max(map(len, texts)))
        is_answer = torch.zeros_like(ids, dtype=torch.bool)
        for row, (text, one) in enumerate(zip(texts, readings, strict=True)):
            ids[row, : len(text)] = torch.tensor(text, device=ids.device)
            is_answer[row, len(one.prompt) : len(text)] = True
        read = Batch(ids, {}, is_answer)
        if self._draft.loaded.vision is None:
            return Read(ids, is_answer)
        return Read(ids, is_answer, _rows(self._draft, texts, [one.vision for one in readings], read))

    def _sequences(self, batch: Batch) -> list[Sequence]:
        """Each row's prompt as the engine has it."""
        found, begins = list[Sequence](), batch.is_answer.long().argmax(1).tolist()
        for row, begin in enumerate(begins):
            ids: list[int] = batch.token_ids[row, :begin].tolist()
            chat = batch.chats[row] if batch.chats else None
            key = ("" if chat is None else chat.text, tuple(ids))
            vision = self._seen.get(key)
            if vision is None:
                vision = prompt_vision(self._target, ids, chat)
                if vision is not None:
                    self._seen.put(key, vision)
            found.append(Sequence(ids, SamplingParams(), 0, frozenset(), 1 << 30, vision=vision))
        return found


def _ends(batch: Batch) -> list[int]:
    """One past each answer's last token."""
    columns = torch.arange(1, batch.token_ids.shape[1] + 1, device=batch.is_answer.device)
    return (batch.is_answer * columns).amax(1).tolist()


def _bytes_of(prompt: VisionPrompt) -> int:
    """Of the tensors, and of the opened pictures beside them."""
    sizes = [getattr(image.source, "size", (0, 0)) for image in prompt.images]
    return sum(t.nbytes for image in prompt.images for t in image.inputs.values()) + sum(3 * w * h for w, h in sizes)


def _rows(runner: ModelRunner, texts: Seq[list[int]], prompts: Seq[VisionPrompt | None], batch: Batch) -> Rows:
    """Texts of several lengths as one model reads them; prompts: None for text alone."""
    half, model = runner.loaded.vision, runner.loaded.model
    assert half is not None
    embeddings = cast("nn.Module", model.get_input_embeddings())
    device, (rows, width) = batch.token_ids.device, batch.token_ids.shape
    known = [one or VisionPrompt((), None, half.family.text_offset) for one in prompts]
    read = list[PromptRows]()
    for text, one in zip(texts, known, strict=True):
        features, _ = runner.images.look(half, one.images)
        copies = [Features(f.rows.clone(), tuple(part.clone() for part in f.deep)) for f in features]  # for autograd
        read.append(prompt_rows(embeddings, text, 0, one, copies))
    is_image = torch.zeros(rows, width, dtype=torch.bool, device=device)
    both_ways = torch.zeros(rows, width, width, dtype=torch.bool, device=device)
    offsets = torch.tensor([one.position_delta for one in known], device=device)
    positions = torch.arange(width, device=device) + offsets[:, None]
    axes = next((one.position_ids.shape[0] for one in read if one.position_ids is not None), 0)
    if axes:
        positions = positions.expand(axes, -1, -1).clone()
    for row, one in enumerate(read):
        assert one.is_image is not None
        length = one.embeds.shape[1]
        is_image[row, :length] = one.is_image[0]
        if one.position_ids is not None:
            positions[:, row, :length] = one.position_ids[:, 0]
        for first, last in one.blocks:
            both_ways[row, first:last, first:last] = True
    features = torch.cat([one.embeds[one.is_image] for one in read])
    deep = tuple(torch.cat(parts) for parts in zip(*(one.deep for one in read if one.deep), strict=True))
    crosses = any(one.blocks_cross_window for one in read)
    return Rows(features.detach(), is_image, deep, positions, offsets, both_ways, crosses)


def plain_halves(folder: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The language model of a folder in float32 as transformers has it, frozen, and the whole if that sees.

    Raises `ConfigError`.
    """
    try:
        if not is_vlm(AutoConfig.from_pretrained(folder, trust_remote_code=False)):
            return plain_model(folder, device), None
        whole = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {folder!r} cannot be read for training", got=str(error)) from error
    whole = cast("Any", whole).to(device).eval().requires_grad_(False)
    return text_half(whole), whole
