"""What the training tests share: answers of a tiny model on disk, and a recipe small enough to train in a moment."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from paceline import LLM
from paceline.train.config import PrepareSection, TrainConfig
from paceline.train.data import Answers
from paceline.train.log import Saved, Started
from paceline.train.loop import train
from paceline.train.prepare import TrainPrompt, prepare
from paceline.train.recipe import Batch, Losses, Recipe
from paceline.train.stages import Done, Stages
from paceline.train.task import AnswerTask
from tests.helpers import NO_EOS, VOCAB, loaded, prompt, runner

LAYERS = (1, 2)


def write_answers(
    folder: Path, count: int = 24, layers: tuple[int, ...] = LAYERS, part: tuple[int, int] = (0, 1), seed: int = 0,
    limit_rounds: int | None = None, eos_ids=NO_EOS,
):  # fmt: skip
    """Let the tiny model answer prompts of many lengths; a limit of rounds has the effect of a kill."""
    prompts = [TrainPrompt(("a", "b")[i % 2], prompt(3 + 5 * i % 17, seed=100 + i)) for i in range(count)]
    config = PrepareSection(limit=count, max_tokens=12, part=part, seed=seed)
    writing = prepare(runner(loaded()), prompts, eos_ids, config, folder, layers)
    for index, _ in enumerate(writing):
        if index == limit_rounds:
            writing.close()
            return folder
    return folder


class Toy(Recipe):
    """Foresees the next token from two states, with noise on them: what a resumed run must draw again."""

    states = LAYERS

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.module = nn.Linear(2 * 32, VOCAB)
        self.seen: list[Batch] = []

    @classmethod
    def check(cls, plan):
        pass

    @classmethod
    def build(cls, plan, answers):
        return cls()

    def loss(self, batch: Batch) -> Losses:
        self.seen.append(batch)
        states = torch.cat([batch.states[layer] for layer in self.states], -1)[:, :-1]
        if self.module.training:
            states = states + 0.1 * torch.randn_like(states)
        counts = batch.is_answer[:, 1:]
        logits, labels = self.module(states)[counts], batch.token_ids[:, 1:][counts]
        loss = nn.functional.cross_entropy(logits, labels)
        right = (logits.argmax(-1) == labels).float().mean()
        return Losses(loss, {"ce": loss.detach()}, torch.stack([right, right / 2]))


def trained(recipe: Recipe, answers: Answers, config: TrainConfig, folder: Path, until: int | None = None):
    """The events of a training run, which is abandoned once the checkpoint of step `until` is written."""
    training, held_out = answers.split(config.held_out)
    events = []
    for event in train(AnswerTask(recipe, training, held_out, config), config, folder):
        events.append(event)
        if isinstance(event, Saved) and event.step == until:
            break
    return events


def descend(recipe: Recipe, batch: Batch, steps: int, lr: float) -> list[Losses]:
    """Losses before each step of Adam, and after the last."""
    recipe.module.train()
    optimizer = torch.optim.Adam([p for p in recipe.module.parameters() if p.requires_grad], lr=lr)
    losses = [recipe.loss(batch)]
    for _ in range(steps):
        optimizer.zero_grad()
        losses[-1].total.backward()
        optimizer.step()
        losses.append(recipe.loss(batch))
    return losses


def write_prompts(folder: Path, count: int = 10) -> None:
    """`prompts.jsonl` of texts of two to eight words."""
    prompts = [" ".join(f"w{5 + (7 * i + 3 * j) % 90}" for j in range(2 + i % 7)) for i in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))


def finished(run: Stages, *names: str) -> list[Done]:
    """The ends of these stages."""
    return [event for name in names for event in run.run(name) if isinstance(event, Done)]


_ENGINES: dict[str, LLM] = {}


def with_one_engine(run: Stages) -> Stages:
    """The run, on an engine that all runs on this model have."""
    key = repr((run.config.model, run.config.dtype, run.config.device, run.config.prepare))
    run.__dict__["llm"] = _ENGINES.get(key) or _ENGINES.setdefault(key, run.llm)
    return run


def weights(recipe: Recipe) -> list[torch.Tensor]:
    return [p.detach().clone() for p in recipe.module.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_resumed(make: Callable[[], Recipe], answers: Answers, config: TrainConfig, folder: Path) -> None:
    """A run that was stopped after two steps ends with the bits of one that was not."""
    whole, again = make(), make()
    trained(whole, answers, config, folder / "whole")
    trained(make(), answers, config, folder / "stopped", until=2)
    torch.manual_seed(99)  # another process
    events = trained(again, answers, config, folder / "stopped")
    assert isinstance(events[0], Started)
    assert events[0].resumed
    assert same(weights(whole), weights(again))
    assert not same(weights(whole), weights(make()))


def in_two_processes(code: str, *arguments: str) -> None:
    """Run the code as the two ranks of one training run on the CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    workers = []
    for rank in ("0", "1"):
        env = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *arguments]
        workers.append(subprocess.Popen(command, env=env, cwd=Path(__file__).parents[2]))
    assert [worker.wait(300) for worker in workers] == [0, 0]
