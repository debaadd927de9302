"""The first two stages as tasks of the training loop: eyes, then talk."""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from paceline.eval.suites import EasyVqa
from paceline.train.extras import need
from paceline.train.recipe import Losses
from paceline.train.run_folder import understood

from .config import VlmConfig
from .course import Group, Task
from .eyes import GRID, Eyes, Patches, draw, scenes_of
from .judge import held_out, judge
from .lessons import HELD_OUT, lesson
from .package import Eyes as EyesState
from .scene import Scene
from .shape import make_model, make_processor
from .talk import Batch, Picture, answer_logits, answer_weights, collate, right_answers

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WEIGHTS = {"shape": 1.0, "colour": 1.0, "text": 1.0, "height": 0.5, "words": 1.0}
"""Of the losses of the first stage."""


@final
class EyesTask(Task[tuple[Tensor, list[Patches]]]):
    """Tower and projector learn what lies under each patch."""

    def __init__(self, language_model: Path, config: VlmConfig, device: torch.device):
        self._config, self._how = config, config.eyes
        with torch.random.fork_rng(devices=[]):
            model = make_model(language_model, seed=config.seed, tower=config.tower).to(device)  # type: ignore[arg-type]
            torch.manual_seed(config.seed)
            self.eyes = Eyes(model, make_processor(language_model).tokenizer).to(device)
        self._device = device
        self.groups = [Group(list(self.eyes.parameters()), self._how.lr)]
        self.identity = {"stage": "eyes", "tower": asdict(config.tower), "seed": config.seed, "batch": self._how.batch}

    def trained(self) -> dict[str, Tensor]:
        """All but the language model, whose embeddings the projector aims at."""
        return self.eyes.state_dict()

    def lessons(self, step: int) -> Seq[list[Scene]]:
        """Scenes in micro-batches."""
        scenes, size = scenes_of(step, self._how.batch, self._config.seed + 1), self._how.micro_batch
        return [scenes[i : i + size] for i in range(0, len(scenes), size)]

    def batch(self, lesson: list[Scene]) -> tuple[Tensor, list[Patches]]:
        """Pixels and labels."""
        pixels, patches = draw(lesson)
        return pixels.to(self._device), patches

    def weight(self, batch: tuple[Tensor, list[Patches]]) -> float:
        """Pictures."""
        return len(batch[1])

    def columns(self, batch: tuple[Tensor, list[Patches]]) -> int:
        """Patches."""
        return len(batch[1]) * GRID**2

    def loss(self, batch: tuple[Tensor, list[Patches]]) -> Losses:
        """Cross entropies of the labels and the distance to the words."""
        parts = self.eyes.losses(*batch)
        total = torch.stack([_WEIGHTS[name] * part for name, part in parts.items()]).sum()
        return Losses(total, {name: part.detach() for name, part in parts.items()}, torch.empty(0))

    def evaluate(self) -> tuple[float, dict[str, float], list[float]]:
        """Losses on scenes that are never trained on."""
        scenes = [one for step in range(4) for one in scenes_of(HELD_OUT + step, 8, self._config.seed)]
        losses = self.loss(self.batch(scenes))
        return float(losses.total), {name: float(part) for name, part in losses.parts.items()}, []


@final
class TalkTask(Task[Batch]):
    """Low-rank layers, tower and projector learn to answer."""

    def __init__(
        self, language_model: Path, eyes: EyesState, config: VlmConfig, device: torch.device,
        easy: Seq[EasyVqa], easy_test: Seq[EasyVqa],
    ):  # fmt: skip
        self._config, self._how, self._device, self._easy = config, config.talk, device, list(easy)
        self.processor = make_processor(language_model)
        model = make_model(language_model, tower=config.tower)
        load_eyes(model, eyes)
        model.requires_grad_(False)
        self.lora = add_lora(model, self._how.rank, config.seed)
        self.model = model.to(device)  # type: ignore[arg-type]
        seen = list(eyes_of(model).parameters())
        for parameter in seen:
            parameter.requires_grad_(True)
        self.groups = [Group(list(self.lora.values()), self._how.lr), Group(seen, self._how.eyes_lr)]
        self._held_out = held_out(config.held_out, easy_test)
        self.identity = {
            "stage": "talk", "tower": asdict(config.tower), "seed": config.seed, "rank": self._how.rank,
            "pictures": [self._how.scenes, self._how.easy, dict(self._how.asks)], "easy_vqa": hash_easy(easy),
            "eyes": hash_of(eyes.named()),
        }  # fmt: skip

    @property
    def eyes(self) -> EyesState:
        """Tower and projector as they are now."""
        inner = self.model.model
        return EyesState(inner.vision_tower.state_dict(), inner.multi_modal_projector.state_dict())

    def trained(self) -> dict[str, Tensor]:
        """Low-rank layers and eyes."""
        return self.lora | self.eyes.named()

    def lessons(self, step: int) -> Seq[Picture]:
        """One picture is one micro-batch: what differs in length is not padded."""
        return lesson(step, self._easy, self._how.scenes, self._how.easy, self._config.seed, self._how.asks)

    def batch(self, lesson: Picture) -> Batch:
        """With all its questions side by side."""
        return collate([lesson], self.processor, GRID**2).to(self._device)

    def weight(self, batch: Batch) -> float:
        """A long answer counts for more than a short one, but not by its length."""
        return float(answer_weights(batch).sum())

    def columns(self, batch: Batch) -> int:
        """Tokens, the picture's among them."""
        return batch.token_ids.numel()

    def loss(self, batch: Batch) -> Losses:
        """Cross entropy of the answers, and the share of them that greedy decoding would give."""
        logits, wanted = answer_logits(self.model, batch)
        weights = answer_weights(batch)
        loss = (nn.functional.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum()
        right = right_answers(logits.detach(), wanted, batch.owner).float().mean()
        return Losses(loss, {"right": right}, torch.empty(0))

    def evaluate(self) -> tuple[float, dict[str, float], list[float]]:
        """Shares of right answers by kind of question."""
        logits = lambda batch: answer_logits(self.model, batch)  # noqa: E731
        return judge(self._held_out, self.processor, GRID**2, self._device, logits)


def add_lora(model: LlavaForConditionalGeneration, rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Put low-rank layers of peft into every linear layer of the language model; scale 2. Returns them by name."""
    peft = need("peft", "training a vision-language model")
    chosen = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LINEARS), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.model.language_model = peft.get_peft_model(model.model.language_model, chosen)  # type: ignore[assignment, arg-type]
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def eyes_of(model: LlavaForConditionalGeneration) -> nn.ModuleList:
    """Tower and projector."""
    return nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])


def load_eyes(model: LlavaForConditionalGeneration, eyes: EyesState) -> None:
    """Put them in. Raises `ConfigError` for those of another tower."""
    with understood("what the stage `eyes` wrote", "remove the folder eyes, and run that stage again"):
        model.model.vision_tower.load_state_dict(dict(eyes.tower))
        model.model.multi_modal_projector.load_state_dict(dict(eyes.projector))


def hash_easy(examples: Seq[EasyVqa]) -> str:
    """Of all questions and answers."""
    return hashlib.sha256(repr([one.questions for one in examples]).encode()).hexdigest()


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Of the values, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
