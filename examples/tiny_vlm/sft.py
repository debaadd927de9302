"""Supervised fine-tuning: many questions about one image in one pass, none of which sees another.

    prefix                              branch 0                   branch 1
    <|im_start|>user \n [image] x 64  | question 0 ... answer 0  | question 1 ... answer 1  | ...
    positions 0 .. p - 1              | p, p + 1, ...            | p, p + 1, ...

A branch sees the prefix and itself, so it is computed exactly as if it were alone after the image, and the image, the
longest part, is computed once.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import ClassVar, final

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from paceline.train.loop import Task
from paceline.train.recipe import Losses
from paceline.train.run_folder import hash_tensors, understood

from .config import DistillSection, SftSection, VlmConfig
from .model import GRID, add_lora, make_model, make_processor, vision_parts
from .pretrain import pixels_of
from .questions import KINDS, EasyVqa, Kind, ask
from .scene import HELD_OUT, make_scene, render

IGNORED = -100
PER_SCENE: Mapping[Kind, int] = {"yes/no": 2, "choice": 2, "short": 3, "caption": 1, "steps": 1}


@dataclass(frozen=True)
class ImageChats:
    """An image and conversations about it, each a list of (question, answer). kind: of a held-out one, for reports."""

    image: Image.Image
    branches: tuple[tuple[tuple[str, str], ...], ...]
    kind: str | None = None


@dataclass(frozen=True)
class Batch:
    """token_ids, positions, targets [B, T] (what follows, or IGNORED); mask [B, 1, T, T]; pixels [B, 3, s, s].

    owner: the branch that each target belongs to, counted over the batch, in the order of the targets that count.
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor
    pixels: Tensor
    owner: Tensor
    kind: str | None = None

    def to(self, device: torch.device) -> "Batch":
        parts = (self.token_ids, self.positions, self.targets, self.mask, self.pixels, self.owner)
        return Batch(*(part.to(device) for part in parts), self.kind)


def encode_branch(turns: tuple[tuple[str, str], ...], processor: LlavaProcessor) -> tuple[list[int], list[int]]:
    """Tokens behind the image, and for each the token that follows, where it is part of an answer."""
    tokenizer = processor.tokenizer
    ids: list[int] = []
    follows: list[int] = []
    for place, (question, answer) in enumerate(turns):
        opening = "" if place == 0 else "\n<|im_start|>user\n"
        asked = tokenizer.encode(f"{opening}{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        said = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        ids += asked + said
        follows += [IGNORED] * (len(asked) - 1) + said + [IGNORED]
    return ids, follows


def collate(images: list[ImageChats], processor: LlavaProcessor, image_tokens: int) -> Batch:
    """Lay the branches of each image side by side."""
    tokenizer = processor.tokenizer
    image_id = tokenizer.convert_tokens_to_ids(processor.image_token)
    prefix = [*tokenizer.encode("<|im_start|>user\n", add_special_tokens=False), *[image_id] * image_tokens]
    rows = [[encode_branch(turns, processor) for turns in one.branches] for one in images]
    longest = max(len(prefix) + sum(len(ids) for ids, _ in row) for row in rows)
    token_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    positions, targets = torch.zeros_like(token_ids), torch.full_like(token_ids, IGNORED)
    group = torch.full_like(token_ids, -1)  # -1: padding, 0: prefix, 1 and up: branches
    owners: list[int] = []
    for b, row in enumerate(rows):
        p = len(prefix)
        token_ids[b, :p], positions[b, :p], group[b, :p] = torch.tensor(prefix), torch.arange(p), 0
        begin = p
        for which, (ids, follows) in enumerate(row, 1):
            span = slice(begin, begin + len(ids))
            token_ids[b, span], targets[b, span] = torch.tensor(ids), torch.tensor(follows)
            positions[b, span], group[b, span] = torch.arange(p, p + len(ids)), which
            owners += [sum(map(len, rows[:b])) + which - 1] * sum(token != IGNORED for token in follows)
            begin = span.stop
    same = (group[:, :, None] == group[:, None, :]) | (group[:, None, :] == 0)
    mask = same & torch.ones(longest, longest, dtype=torch.bool).tril()
    mask |= torch.eye(longest, dtype=torch.bool)  # padding sees itself: a row that sees nothing is NaN
    pixels = pixels_of([one.image for one in images])
    return Batch(token_ids, positions, targets, mask[:, None], pixels, torch.tensor(owners), images[0].kind)


def answer_logits(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [n, V] at the places whose next token is part of an answer, and these tokens [n]."""
    hidden = model.model(
        input_ids=batch.token_ids,
        pixel_values=batch.pixels,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state
    counts = batch.targets != IGNORED
    return model.lm_head(hidden[counts]), batch.targets[counts]


def answer_weights(batch: Batch) -> Tensor:
    """For each target 1 / sqrt(length of its answer), [n]: else a few long answers would outweigh the one-word ones."""
    return torch.bincount(batch.owner)[batch.owner].float().rsqrt()


def right_answers(logits: Tensor, wanted: Tensor, owner: Tensor) -> Tensor:
    """For each branch whether greedy decoding would give exactly its answer. [branches], bool."""
    hit = logits.argmax(-1) == wanted
    count = int(owner.max()) + 1
    return torch.zeros(count, device=hit.device).index_add(0, owner, (~hit).float()) == 0


# The data: a function of (seed, step)


def scene_chats(seed: int, only: Kind | None = None) -> ImageChats:
    """A scene with questions of every kind, some in conversations of two turns. only: one question of this kind."""
    rng, scene = Random(f"lesson {seed}"), make_scene(seed)
    asked: list[tuple[str, str]] = []
    for kind in KINDS:
        for turn in range(PER_SCENE[kind] if only is None else int(kind == only)):
            question = ask(scene, kind, seed * 8 + turn)
            if (question.text, question.answer) not in asked:
                asked.append((question.text, question.answer))
    branches: list[tuple[tuple[str, str], ...]] = []
    for question in asked:
        joins = branches and len(branches[-1]) == 1 and rng.random() < 0.15
        branches[-1:] = [(*branches[-1], question)] if joins else [*branches[-1:], (question,)]
    return ImageChats(render(scene), tuple(branches))


def easy_chats(example: EasyVqa) -> ImageChats:
    """An image of easy-VQA with all its questions."""
    return ImageChats(example.image(), tuple((question,) for question in example.questions))


def step_chats(
    step: int, easy: Sequence[EasyVqa], num_scenes: int = 2, num_easy: int = 1, seed: int = 0
) -> list[ImageChats]:
    """The images of one step; without easy-VQA more scenes instead."""
    rng = Random(f"{seed} {step}")
    count = num_scenes + (0 if easy else num_easy)
    made = [scene_chats(rng.getrandbits(40)) for _ in range(count)]
    return made + [easy_chats(rng.choice(easy)) for _ in range(num_easy if easy else 0)]


def held_out_chats(count: int, easy: Sequence[EasyVqa] = ()) -> list[ImageChats]:
    """`count` held-out scenes with one question each for every kind, and half as many images of easy-VQA."""
    scenes = [replace(scene_chats(HELD_OUT + i, kind), kind=kind) for kind in KINDS for i in range(count)]
    return scenes + [replace(easy_chats(one), kind="easy-VQA") for one in easy[: max(1, count // 2)]]


def hash_easy(examples: Sequence[EasyVqa]) -> str:
    """A hash of all questions and answers."""
    return hashlib.sha256(repr([one.questions for one in examples]).encode()).hexdigest()


class ChatTask(Task[Batch]):
    """A task whose items are images with their conversations; one image is one micro-batch, so nothing is padded."""

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor
    first_seed: ClassVar[int] = 0
    """Added to the seed of the images."""

    def __init__(
        self, config: VlmConfig, how: SftSection | DistillSection, device: torch.device, easy: Sequence[EasyVqa],
        easy_test: Sequence[EasyVqa],
    ):  # fmt: skip
        self._how, self._device, self._easy = how, device, easy
        self.held_out = held_out_chats(config.held_out, easy_test)
        self.data = {"images": how.steps * (how.scenes + how.easy)}

    def num_steps(self, devices: int) -> int:
        return self._how.steps

    def items(self, step: int, devices: int) -> Sequence[ImageChats]:
        how = self._how
        return step_chats(step, self._easy, how.scenes, how.easy, how.seed + self.first_seed)

    def load(self, item: ImageChats) -> Batch:
        return collate([item], self.processor, GRID**2)

    def weight(self, batch: Batch) -> float:
        """A long answer counts for more than a short one, but not by its length; held-out answers count alike."""
        return float(batch.owner.max() + 1) if batch.kind else float(answer_weights(batch).sum())

    def shares(self, batch: Batch, logits: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """The share of answers that greedy decoding would give, of held-out ones by kind."""
        right = right_answers(logits.detach(), wanted, batch.owner).float().mean()
        return {batch.kind or "right": right}


@final
class SftTask(ChatTask):
    """Low-rank layers, tower and projector learn to answer."""

    def __init__(
        self, language_model: Path, vision: Mapping[str, Tensor], config: VlmConfig, device: torch.device,
        easy: Sequence[EasyVqa], easy_test: Sequence[EasyVqa],
    ):  # fmt: skip
        super().__init__(config, config.sft, device, easy, easy_test)
        how, self._vision_lr = config.sft, config.sft.vision_lr
        self.processor = make_processor(language_model)
        model = make_model(language_model, tower=config.tower).requires_grad_(False)
        self.parts = vision_parts(model)
        with understood("the vision parts of the stage `pretrain`", "remove its folder, and run that stage again"):
            self.parts.load_state_dict(dict(vision))
        self.lora = add_lora(model, how.rank, how.seed)
        self.parts.requires_grad_(True)
        self.module = self.model = model.to(device)  # type: ignore[arg-type]
        self.identity = {
            "stage": "sft", "tower": asdict(config.tower), "rank": how.rank, "easy_vqa": hash_easy(easy),
            "images": [how.scenes, how.easy], "vision": hash_tensors(vision),
        }  # fmt: skip

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Low-rank layers; tower and projector at a lower rate."""
        return [(list(self.lora.values()), 1.0), (list(self.parts.parameters()), self._vision_lr)]

    def state(self) -> dict[str, Tensor]:
        return {**self.lora, **self.parts.state_dict()}

    def loss(self, batch: Batch) -> Losses:
        batch = batch.to(self._device)
        logits, wanted = answer_logits(self.model, batch)
        weights = answer_weights(batch)
        loss = (nn.functional.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum()
        return Losses(loss, self.shares(batch, logits, wanted), torch.empty(0))
