"""Third stage: a smaller language model behind the same eyes learns to speak as the trained one does.

    picture ── tower, projector (frozen, once) ── embeddings ──┬── trained model, 30 layers ── p
                                                               └── sibling, 8 layers, LoRA ── q      loss(p, q)

Both read the same right answers, so p is the law that a draft is judged by while the target answers rightly. The
sibling's layers begin as those of the trained model (`over`) or of its base; embeddings, norms and output head are the
base's in both.
"""

from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from paceline.eval.suites import EasyVqa
from paceline.train.losses import compared, loss_named
from paceline.train.recipe import Losses
from paceline.zoo.merge import language_weights
from paceline.zoo.packaged import PackagedVlm

from .config import VlmConfig
from .course import Group, Task
from .eyes import GRID
from .judge import held_out, judge
from .lessons import lesson
from .shape import evenly_spaced, make_model, make_processor
from .talk import IGNORED, Batch, Picture, collate, right_answers
from .tasks import add_lora, hash_easy


@final
class DistillTask(Task[Batch]):
    """Low-rank layers of the sibling learn the trained model's law.

    teacher: the packaged model; teacher_folder: the same, merged.
    """

    def __init__(
        self, language_model: Path, teacher: PackagedVlm, teacher_folder: Path, config: VlmConfig,
        device: torch.device, easy: Seq[EasyVqa], easy_test: Seq[EasyVqa],
    ):  # fmt: skip
        self._config, self._how, self._device, self._easy = config, config.distill, device, list(easy)
        self.processor = make_processor(language_model)
        big: Any = AutoModelForImageTextToText.from_pretrained(
            teacher_folder, dtype=torch.float32, trust_remote_code=False
        )
        self._teacher = big.to(device).eval().requires_grad_(False)
        kept = evenly_spaced(len(teacher.layers), self._how.layers)
        model = make_model(language_model, self._how.layers, tower=config.tower)
        if self._how.over:
            weights = language_weights(_cut(teacher, kept), language_model)
            state = {name.removeprefix("model."): value.float() for name, value in weights.items()}
            state = {name: value for name, value in state.items() if name != "lm_head.weight"}
            model.model.language_model.load_state_dict(state)
        model.requires_grad_(False)
        self.lora = add_lora(model, self._how.rank, config.seed)
        self.model = model.to(device)  # type: ignore[arg-type]
        self._loss = loss_named(self._how.loss)
        self.groups = [Group(list(self.lora.values()), self._how.lr)]
        self._held_out = held_out(config.held_out, easy_test)
        how = asdict(self._how)
        told = {key: how[key] for key in ("layers", "rank", "scenes", "easy", "loss", "ce_weight", "over")}
        self.identity = {"stage": "distill", "seed": config.seed, "teacher": teacher.sha256, **told}
        self.identity["easy_vqa"] = hash_easy(easy)

    def trained(self) -> dict[str, Tensor]:
        """Low-rank layers."""
        return dict(self.lora)

    def lessons(self, step: int) -> Seq[Picture]:
        """Other pictures than the second stage had."""
        return lesson(step, self._easy, self._how.scenes, self._how.easy, self._config.seed + 1)

    def batch(self, lesson: Picture) -> Batch:
        """With all its questions side by side."""
        return collate([lesson], self.processor, GRID**2).to(self._device)

    def weight(self, batch: Batch) -> float:
        """Answer tokens."""
        return int((batch.targets != IGNORED).sum())

    def columns(self, batch: Batch) -> int:
        """Tokens, the picture's among them."""
        return batch.token_ids.numel()

    def loss(self, batch: Batch) -> Losses:
        """Distance of the laws; beside it what drafts of this law would earn, and the share of right answers."""
        target, logits = self.both(batch)
        wanted = batch.targets[batch.targets != IGNORED]
        loss = self._loss(target, logits)
        if self._how.ce_weight:
            loss = loss + self._how.ce_weight * nn.functional.cross_entropy(logits, wanted)
        stands, agrees = compared(target, logits)
        right = right_answers(logits.detach(), wanted, batch.owner).float().mean()
        return Losses(loss, {"right": right, "stands": stands.mean()}, agrees.float().mean()[None])

    def evaluate(self) -> tuple[float, dict[str, float], list[float]]:
        """Shares of right answers by kind, and how often the best tokens agree."""
        seen: list[Tensor] = []

        def logits(batch: Batch) -> tuple[Tensor, Tensor]:
            target, own = self.both(batch)
            seen[:] = [target]
            return own, batch.targets[batch.targets != IGNORED]

        def agrees(batch: Batch, own: Tensor) -> float:
            return float(compared(seen[0], own)[1].float().mean())

        return judge(self._held_out, self.processor, GRID**2, self._device, logits, agrees)

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


def _cut(teacher: PackagedVlm, kept: list[int]) -> PackagedVlm:
    """The packaged model with these of its layers alone."""
    adapters = tuple(replace(one, layers=tuple(one.layers[i] for i in kept)) for one in teacher.adapters)
    return replace(teacher, layers=tuple(teacher.layers[i] for i in kept), adapters=adapters)
