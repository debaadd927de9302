"""Vision pretraining: the tower learns to recognise what is under each patch, the projector to word it.

A language model in the loop teaches a new vision tower slowly. Here every patch has labels (shape, colour, printed
text, height of a bar), and the projected patch is drawn to the mean of the token embeddings of its words, such as
"red circle top left": the language model gets images that it can nearly read.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, cast, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerBase

from paceline.train.loop import Task
from paceline.train.recipe import Losses

from .config import VlmConfig
from .model import GRID, PATCH, make_model, make_processor, vision_parts
from .scene import COLOURS, HELD_OUT, SHAPES, SIZE, WORDS, Scene, make_scene, outline, render

_WEIGHTS = {"shape": 1.0, "colour": 1.0, "text": 1.0, "height": 0.5, "words": 1.0}
"""Of the losses."""
LABELS = {"shape": 3 + len(SHAPES), "colour": 1 + len(COLOURS), "text": 121, "height": 10}
"""Classes of each label; 0: nothing there."""


@dataclass(frozen=True)
class Patches:
    """Labels of one image, [G, G] each, and the words of each patch."""

    labels: dict[str, np.ndarray]
    words: list[list[str]]


def describe(scene: Scene) -> Patches:
    """The content of each patch of the image: what covers most of its box, if at least a fifth of it."""
    labels = {name: np.zeros((GRID, GRID), dtype=np.int64) for name in LABELS}
    cover, words = np.full((GRID, GRID), 0.2), [[""] * GRID for _ in range(GRID)]
    colours = list(COLOURS)

    def put(box: tuple[float, float, float, float], said: str, **values: int) -> None:
        left, top, right, bottom = (edge / PATCH for edge in box)
        for y in range(GRID):
            for x in range(GRID):
                part = max(0.0, min(right, x + 1) - max(left, x)) * max(0.0, min(bottom, y + 1) - max(top, y))
                if part > cover[y, x]:
                    cover[y, x], words[y][x] = part, said
                    for name, value in values.items():
                        labels[name][y, x] = value

    for thing in scene.things:
        xs, ys = zip(*outline(thing, SIZE), strict=True)
        box = (min(xs), min(ys), max(xs), max(ys))
        said = f" {thing.name} {thing.place}"
        put(box, said, shape=1 + SHAPES.index(thing.shape), colour=1 + colours.index(thing.colour))
    if scene.sign is not None:
        text = scene.sign.text
        half = SIZE * 0.45 * min(1.0, len(text) / 3)
        which = 1 + WORDS.index(text) if text in WORDS else 21 + int(text)
        box = (SIZE / 2 - half, SIZE * 0.38, SIZE / 2 + half, SIZE * 0.62)
        said = f" {scene.sign.colour} text {text} {text}"
        put(box, said, shape=len(SHAPES) + 1, colour=1 + colours.index(scene.sign.colour), text=which)
    if scene.bars is not None:
        step = SIZE / len(scene.bars.heights)
        for i, (colour, height) in enumerate(zip(scene.bars.colours, scene.bars.heights, strict=True)):
            box = ((i + 0.2) * step, SIZE * (0.95 - height * 0.1), (i + 0.8) * step, SIZE * 0.95)
            values = {"shape": len(SHAPES) + 2, "colour": 1 + colours.index(colour), "height": height}
            put(box, f" {colour} bar {height}", **values)
    return Patches(labels, words)


def pixels_of(images: list[Image.Image]) -> Tensor:
    """As the processor makes them, [n, 3, SIZE, SIZE] in [-1, 1]."""
    arrays = np.stack([np.asarray(image.convert("RGB").resize((SIZE, SIZE), 3), dtype=np.float32) for image in images])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2) / 127.5 - 1


class PatchClassifier(nn.Module):
    """Tower, projector, and classifiers of the patches that are not kept afterwards."""

    def __init__(self, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerBase):
        super().__init__()
        self.parts = vision_parts(model)
        width = int(cast("Any", model.config.vision_config).hidden_size)
        self.heads = nn.ModuleDict({name: nn.Linear(width, count) for name, count in LABELS.items()})
        self._embeddings = [cast("Any", model.get_input_embeddings()).weight.detach()]
        self._tokenizer = tokenizer
        self._said: dict[str, Tensor] = {}

    def word(self, said: str) -> Tensor:
        """Mean of the token embeddings of these words. [E]."""
        if said not in self._said:
            ids = self._tokenizer.encode(said or " empty", add_special_tokens=False)
            self._said[said] = self._embeddings[0][torch.tensor(ids)].mean(0)
        return self._said[said]

    def losses(self, pixels: Tensor, patches: list[Patches]) -> dict[str, Tensor]:
        """Cross entropy of each label, and the distance of the projected patches to their words."""
        place = next(self.parts.parameters()).device
        states = self.parts["vision_tower"](pixel_values=pixels.to(place), output_hidden_states=True).hidden_states[-1]
        found: dict[str, Tensor] = {}
        for name, head in self.heads.items():
            wanted = torch.from_numpy(np.stack([p.labels[name] for p in patches])).flatten(1).to(place)
            found[name] = nn.functional.cross_entropy(head(states).flatten(0, 1), wanted.flatten())
        said = torch.stack([torch.stack([self.word(w) for row in p.words for w in row]) for p in patches])
        projected = self.parts["multi_modal_projector"](states)
        found["words"] = ((projected - said) ** 2).mean() / said.var()
        return found


def scenes_of(step: int, count: int, seed: int) -> list[Scene]:
    """Fresh scenes for a step; signs and charts twice as often as in `make_scene`."""
    rng = Random(f"{seed} {step}")
    made: list[Scene] = []
    while len(made) < count:
        scene = make_scene(rng.getrandbits(40))
        if scene.kind != "shapes" or rng.random() < 0.6:
            made.append(scene)
    return made


@final
class PretrainTask(Task[tuple[Tensor, list[Patches]]]):
    """Tower and projector learn the labels of patches; an item is a list of scenes."""

    def __init__(self, language_model: Path, config: VlmConfig, device: torch.device):
        self._how = how = config.pretrain
        with torch.random.fork_rng(devices=[]):
            model = make_model(language_model, seed=how.seed, tower=config.tower).to(device)  # type: ignore[arg-type]
            torch.manual_seed(how.seed)
            self.module = PatchClassifier(model, make_processor(language_model).tokenizer).to(device)
        self.identity = {"stage": "pretrain", "tower": asdict(config.tower), "batch": how.batch}
        self.data = {"scenes": how.steps * how.batch}
        self.held_out = [scenes_of(HELD_OUT + step, 8, how.seed) for step in range(4)]

    def num_steps(self, devices: int) -> int:
        return self._how.steps

    def items(self, step: int, devices: int) -> Sequence[list[Scene]]:
        scenes, size = scenes_of(step, self._how.batch, self._how.seed + 1), self._how.micro_batch
        return [scenes[i : i + size] for i in range(0, len(scenes), size)]

    def load(self, item: list[Scene]) -> tuple[Tensor, list[Patches]]:
        return pixels_of([render(scene) for scene in item]), [describe(scene) for scene in item]

    def weight(self, batch: tuple[Tensor, list[Patches]]) -> int:
        return len(batch[1])

    def loss(self, batch: tuple[Tensor, list[Patches]]) -> Losses:
        parts = cast("PatchClassifier", self.module).losses(*batch)
        total = torch.stack([_WEIGHTS[name] * part for name, part in parts.items()]).sum()
        return Losses(total, {name: part.detach() for name, part in parts.items()}, torch.empty(0))
