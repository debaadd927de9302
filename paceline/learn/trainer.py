"""The trainer: a process that takes gradient steps on a copy of the head while the server has nothing else to do.

    python -m paceline.learn.trainer FOLDER '{"every": 8192, ...}'

The server writes 1 to its standard input when it is idle and 0 when it is not; where that ends, the trainer does, too.
A round trains on the newest answers and compares the result with the head before it on those held back, which no round
learns from. A better one becomes a new folder in heads/, which the server takes from there.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import safe_open

from ..errors import ConfigError
from ..methods.method import named
from ..methods.table import trained_method
from ..schema import validate
from ..target import LoadedModel
from ..train.artefact import save_trained
from ..train.config import RunConfig, TrainConfig
from ..train.data import Answers, close_states
from ..train.log import Evaluated, Window, accepted_length
from ..train.loop import train
from ..train.prepare import PreparedAnswer
from ..train.recipe import Recipe
from ..train.task import AnswerTask
from .folder import LearnFolder, LearnSettings, recent
from .target import load_target

_LOSS: dict[str, dict[str, object]] = {
    "eagle": {"steps": 4, "decay": 0.9, "ce_weight": 1.0, "regress": 0.0, "noise": 0.0}
}
"""`train.loss` of a method, where its recipe's own is not the best (docs/log/2026-11-results.md)."""
_POLL_S = 1.0


@final
class Gate:
    """Closed while the server works. Steps wait in front of it."""

    def __init__(self, is_open: bool = False):
        self._open = threading.Event()
        if is_open:
            self._open.set()

    def follow(self, pipe: int) -> None:
        """Do what the server writes, in a thread; end this process when the server has ended."""
        threading.Thread(target=self._follow, args=(pipe,), daemon=True).start()

    def _follow(self, pipe: int) -> None:
        while said := os.read(pipe, 1 << 10):
            self.turn(said[-1:] == b"1")
        os._exit(0)

    def turn(self, is_open: bool) -> None:
        """Open or close it."""
        (self._open.set if is_open else self._open.clear)()

    def wait(self, *_: object) -> None:
        """Wait until it is open."""
        self._open.wait()


@final
class Trainer:
    """Rounds of training in a folder of `learn.folder`, for the target in it."""

    def __init__(self, folder: LearnFolder, settings: LearnSettings, gate: Gate):
        self._folder, self._settings, self._gate = folder, settings, gate
        about = json.loads((folder.path / "learn.json").read_text())
        self._method, self._is_own = str(about["method"]), about["start"] is None
        self._target = cast("LoadedModel", load_target(folder.path))
        self._recipe: type[Recipe] = named(trained_method(self._method).recipe)
        self._seen = -1  # the newest answer that a round had

    def run(self) -> None:
        """Rounds without end."""
        while True:
            self._gate.wait()
            if not self.step():
                time.sleep(_POLL_S)

    def step(self) -> Path | None:
        """A round, if enough answers are new and no head is on trial; returns the new head, if there is one."""
        if len(self._folder.heads()) > 1:
            return None
        answers = recent(self._folder, self._settings.recent)
        if sum(len(a.answer_ids) for a in answers if a.index > self._seen) < self._settings.every:
            return None
        self._seen = max(answer.index for answer in answers)
        try:
            return self._round(Answers([answer for answer in answers if _is_whole(answer)]))
        except ConfigError as error:  # the oldest answers went while they were read
            print(f"a round ended early: {error}", flush=True)
            return None
        finally:
            close_states()
            shutil.rmtree(self._folder.path / "round", ignore_errors=True)

    def _round(self, answers: Answers) -> Path | None:
        how, heads, log = self._settings, self._folder.heads(), self._folder.path / "round"
        learnt, held_out = answers.split(how.held_out)
        if not len(learnt) or not len(held_out):
            return None
        start = heads[0] if heads else None
        config = RunConfig(
            model=self._target.name,
            out=str(self._folder.path),
            start=None if start is None else str(start),
            head={"draft_vocab_size": 8192} if self._is_own else {},  # the frequent tokens of the newest answers
            train=TrainConfig(
                epochs=how.epochs, max_tokens=how.max_tokens, accumulate=how.accumulate, optimizer="muon",
                lr=how.lr or (5e-3 if start is None else 1e-3), held_out=how.held_out, seed=self._seen,
                log_every=1, checkpoint_seconds=1e9, loss=_LOSS.get(self._method, {}),
            ),
        )  # fmt: skip
        plan = self._recipe.plan(self._method, config, self._target)
        recipe = self._recipe.build(plan, learnt)
        recipe.module.register_forward_pre_hook(self._gate.wait)  # several in a step
        task = AnswerTask(recipe, learnt, held_out, config.train)
        before = 0.0 if start is None else estimate(task)
        after = 0.0
        for event in train(task, config.train, log):
            self._gate.wait()
            after = event.accepted_length if isinstance(event, Evaluated) else after
        print(f"{learnt.num_tokens} tokens: {before:.3f} -> {after:.3f} on {len(held_out)} answers", flush=True)
        if after <= before:
            return None
        place = self._folder.next_head()
        save_trained(place, self._method, recipe, self._target, config, learnt, log)
        return place


@torch.no_grad()
def estimate(task: AnswerTask) -> float:
    """The accepted length that the held-out answers let expect, as training estimates it."""
    window = Window()
    task.module.eval()
    for item in task.held_out:
        batch = task.load(item)
        window.add(task.loss(batch), task.weight(batch))
    return accepted_length(window.means()[2])


def _is_whole(answer: PreparedAnswer) -> bool:
    """Whether the states of an answer can be read; a damaged file is named and left out."""
    file = answer.folder / str(answer.states)
    try:
        with safe_open(file, "pt") as states:
            names: Iterator[str] = iter(states.keys())
            return all(states.get_slice(name).get_shape()[0] == answer.length - 1 for name in names)
    except Exception as error:  # safetensors raises a kind of its own
        print(f"{str(file)!r} cannot be read, and is left out: {error}", flush=True)
        return False


def main(folder: str, settings: str) -> None:
    """Train in a folder until the standard input ends."""
    os.nice(19)
    torch.set_num_threads(1)
    gate = Gate()
    gate.follow(sys.stdin.fileno())
    values: dict[str, Any] = json.loads(settings)
    Trainer(LearnFolder(folder), validate(LearnSettings, values, "the settings"), gate).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
