"""Distillation: a smaller language model behind the same vision tower learns the trained model's distributions.

    image ── tower, projector (frozen, once) ── embeddings ──┬── trained model, 30 layers ── p
                                                             └── sibling, 8 layers, LoRA ── q      loss(p, q)

Both read the same right answers, so p is the distribution that a draft is verified with while the target answers
rightly. The sibling's layers begin as those of the trained model; embeddings, norms and output head are the base's in
both.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from paceline_zoo.vlm import PackagedVlm, language_weights
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from paceline.train.losses import LOSSES, compared
from paceline.train.recipe import Losses

from .config import VlmConfig
from .model import add_lora, evenly_spaced, make_model, make_processor
from .questions import EasyVqa
from .sft import IGNORED, Batch, ChatTask, hash_easy


@final
class DistillTask(ChatTask):
    """Low-rank layers of the sibling learn. teacher: the packaged model; teacher_folder: the same, merged."""

    first_seed = 1  # other images than the stage `sft` had

    def __init__(
        self, language_model: Path, teacher: PackagedVlm, teacher_folder: Path, config: VlmConfig,
        device: torch.device, easy: Sequence[EasyVqa], easy_test: Sequence[EasyVqa],
    ):  # fmt: skip
        super().__init__(config, config.distill, device, easy, easy_test)
        how = config.distill
        self.processor = make_processor(language_model)
        big: Any = AutoModelForImageTextToText.from_pretrained(
            teacher_folder, dtype=torch.float32, trust_remote_code=False
        )
        self._teacher = big.to(device).eval().requires_grad_(False)
        model = make_model(language_model, how.layers, tower=config.tower)
        kept = _with_layers(teacher, evenly_spaced(len(teacher.layers), how.layers))
        found = language_weights(kept, language_model)
        found.pop("lm_head.weight", None)
        weights = {name.removeprefix("model."): weight.float() for name, weight in found.items()}
        model.model.language_model.load_state_dict(weights)
        model.requires_grad_(False)
        self.lora = add_lora(model, how.rank, how.seed)
        self.module = self.model = model.to(device)  # type: ignore[arg-type]
        self._loss = LOSSES[how.loss]
        self.identity = {
            "stage": "distill", "teacher": teacher.sha256, "layers": how.layers, "rank": how.rank, "loss": how.loss,
            "images": [how.scenes, how.easy], "easy_vqa": hash_easy(easy),
        }  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        return dict(self.lora)

    def loss(self, batch: Batch) -> Losses:
        """Distance of the distributions; beside it the share of drafts that would be accepted."""
        batch = batch.to(self._device)
        target, logits = self.both(batch)
        wanted = batch.targets[batch.targets != IGNORED]
        acceptance, agrees = compared(target, logits)
        parts = {**self.shares(batch, logits, wanted), "acceptance": acceptance.mean()}
        return Losses(self._loss(target, logits), parts, agrees.float().mean()[None])

    def both(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [n, V] of the trained model and of the sibling where the next token is part of an answer."""
        inner = self._teacher.model
        counts = batch.targets != IGNORED
        with torch.no_grad():
            embeds = inner.get_input_embeddings()(batch.token_ids)
            features = inner.get_image_features(pixel_values=batch.pixels).pooler_output
            rows = torch.cat(list(features)) if isinstance(features, list | tuple) else features.flatten(0, 1)
            embeds[batch.token_ids == self._teacher.config.image_token_index] = rows.to(embeds.dtype)
            hidden = _hidden(inner.language_model, embeds, batch)
            target = self._teacher.lm_head(hidden[counts])
        own = _hidden(self.model.model.language_model, embeds, batch)
        return target, self.model.lm_head(own[counts])


def _hidden(language_model: nn.Module, embeds: Tensor, batch: Batch) -> Tensor:
    return language_model(
        inputs_embeds=embeds, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state


def _with_layers(teacher: PackagedVlm, kept: list[int]) -> PackagedVlm:
    """The packaged model with these of its layers only."""
    adapters = tuple(replace(one, layers=tuple(one.layers[i] for i in kept)) for one in teacher.adapters)
    return replace(teacher, layers=tuple(teacher.layers[i] for i in kept), adapters=adapters)
