"""The inputs of models for texts whose prompts may hold images: the runner's own prefill, for many texts side by side.

    target    text  <i> <i> <i> <i>  text  answer          <i>: features of its tower
    draft     text  text  answer                           what the draft model makes of the same prompt

Towers and projectors are frozen and each image is encoded once; only language models are trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ..attention.masks import PromptRows
from ..core.request import SamplingParams, TokenSequence
from ..core.vision import VisionPrompt
from ..errors import IncompatibleModels
from ..hf.image_prompts import pixel_bytes
from ..hf.vision import BoundedCache, Features
from ..methods.draft_model.vision import VisionMode, vision_of_draft
from ..target import LoadedModel, ModelRunner
from ..target.prefill import prompt_rows
from .prepare import vision_of
from .recipe import Batch

_KEPT = 256 << 20  # bytes of what processors made


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Inputs of a language model instead of token ids.

    features: of all images, one after another [M, E], which go where is_image [B, T]. deep: the same for the first
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
        fields: dict[str, object] = {"inputs_embeds": embeds, "position_ids": self.positions}
        if self.deep:
            fields["visual_pos_masks"] = self.is_image
            fields["deepstack_visual_embeds"] = [part.to(embeds) for part in self.deep]
        return fields


@dataclass(frozen=True, eq=False)
class ModelInput:
    """Texts as one model reads them, [B, T]. rows: None for a model that reads text alone."""

    ids: Tensor
    is_answer: Tensor
    rows: ImageRows | None = None

    @property
    def first(self) -> int:
        return int(self.is_answer.any(0).nonzero()[0]) - 1  # the column whose next token is an answer's

    @property
    def begins(self) -> Tensor:
        """Column of each answer's first token. [B]."""
        return self.is_answer.long().argmax(1)


@final
class BatchReader:
    """Reads batches as a target that reads images does, and as its draft does. draft, vision: as of `DraftModel`."""

    def __init__(self, target: LoadedModel, draft: LoadedModel | None = None, vision: VisionMode | None = None):
        self._target = ModelRunner(target, 1)
        self._seen = BoundedCache[object, VisionPrompt](_KEPT, pixel_bytes)
        self._vision = None if draft is None else vision_of_draft(vision, self._target, draft)
        self._draft = None if self._vision is None else ModelRunner(cast("LoadedModel", self._vision.loaded), 1)

    @property
    def banned_token_ids(self) -> list[int]:
        draft_ids = frozenset[int]() if self._draft is None else self._draft.banned_token_ids
        return sorted(self._target.banned_token_ids | draft_ids)

    def target(self, batch: Batch) -> ModelInput:
        seqs = self._sequences(batch)
        columns = torch.arange(1, batch.token_ids.shape[1] + 1, device=batch.is_answer.device)
        ends = (batch.is_answer * columns).amax(1)  # one past each answer's last token
        texts = [ids[:end].tolist() for ids, end in zip(batch.token_ids, ends.tolist(), strict=True)]
        return ModelInput(
            batch.token_ids, batch.is_answer, _rows(self._target, texts, [seq.vision for seq in seqs], batch.token_ids)
        )

    def draft(self, batch: Batch) -> ModelInput:
        """The batch as the draft reads it: prompts may be of another length, answers are the same."""
        assert self._vision is not None
        assert self._draft is not None
        readings = [self._vision.read(seq, cast("Any", self._draft)) for seq in self._sequences(batch)]
        answers = [ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.is_answer, strict=True)]
        texts = [reading.prompt + answer for reading, answer in zip(readings, answers, strict=True)]
        ids = batch.token_ids.new_zeros(len(texts), max(map(len, texts)))
        is_answer = torch.zeros_like(ids, dtype=torch.bool)
        for row, (text, reading) in enumerate(zip(texts, readings, strict=True)):
            ids[row, : len(text)] = torch.tensor(text, device=ids.device)
            is_answer[row, len(reading.prompt) : len(text)] = True
        if self._draft.loaded.vision is None:
            return ModelInput(ids, is_answer)
        return ModelInput(ids, is_answer, _rows(self._draft, texts, [reading.vision for reading in readings], ids))

    def _sequences(self, batch: Batch) -> list[TokenSequence]:
        """Each row's prompt as the engine has it."""
        seqs, begins = list[TokenSequence](), batch.is_answer.long().argmax(1).tolist()
        for row, begin in enumerate(begins):
            ids: list[int] = batch.token_ids[row, :begin].tolist()
            chat = batch.chats[row] if batch.chats else None
            key = (() if chat is None else chat.images, tuple(ids))
            vision = self._seen.get(key)
            if vision is None:
                vision = vision_of(self._target, ids, chat)
                if vision is not None:
                    self._seen.put(key, vision)
            seqs.append(TokenSequence(ids, SamplingParams(), 0, frozenset(), 1 << 30, vision=vision))
        return seqs


def _rows(
    runner: ModelRunner, texts: Sequence[list[int]], prompts: Sequence[VisionPrompt | None], ids: Tensor
) -> ImageRows:
    """Texts of several lengths as one model reads them; prompts: None for text alone."""
    half, model = runner.loaded.vision, runner.loaded.model
    assert half is not None
    has_inputs_of_layers = bool(getattr(model.base_model, "hidden_size_per_layer_input", None))
    if half.family.needs_transformers or half.family.blocks == "windowed" or has_inputs_of_layers:
        raise IncompatibleModels(
            "this family's images need more than rows of features, which training does not have yet",
            got=runner.loaded.name, fix="train on text alone",
        )  # fmt: skip
    embeddings = cast("nn.Module", model.get_input_embeddings())
    device, (rows, width) = ids.device, ids.shape
    vision_prompts = [prompt or VisionPrompt((), None, half.family.text_offset) for prompt in prompts]
    read = list[PromptRows]()
    for text, prompt in zip(texts, vision_prompts, strict=True):
        features, _ = runner.images.encode(half, prompt.images)
        copies = [Features(f.rows.clone(), tuple(part.clone() for part in f.deepstack)) for f in features]
        read.append(prompt_rows(embeddings, text, 0, prompt, copies))
    is_image = torch.zeros(rows, width, dtype=torch.bool, device=device)
    both_ways = torch.zeros(rows, width, width, dtype=torch.bool, device=device)
    offsets = torch.tensor([prompt.position_delta for prompt in vision_prompts], device=device)
    positions = torch.arange(width, device=device) + offsets[:, None]
    axes = next((embedded.position_ids.shape[0] for embedded in read if embedded.position_ids is not None), 0)
    if axes:
        positions = positions.expand(axes, -1, -1).clone()
    for row, embedded in enumerate(read):
        assert embedded.is_image is not None
        length = embedded.embeds.shape[1]
        is_image[row, :length] = embedded.is_image[0]
        if embedded.position_ids is not None:
            positions[:, row, :length] = embedded.position_ids[:, 0]
        for first, last in embedded.blocks:
            both_ways[row, first:last, first:last] = True
    features = torch.cat([embedded.embeds[embedded.is_image] for embedded in read])
    deepstacks = [embedded.deepstack for embedded in read if embedded.deepstack]
    deep = tuple(torch.cat(parts) for parts in zip(*deepstacks, strict=True))
    crosses = any(embedded.blocks_cross_window for embedded in read)
    return ImageRows(features.detach(), is_image, deep, positions, offsets, both_ways, crosses)
