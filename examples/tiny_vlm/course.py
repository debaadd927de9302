"""The training loop of the stages: a step is some micro-batches, whose gradients add up, on one device or many.

Lessons are a function of (seed, step), and nothing in a step is random, so a run that goes on from a checkpoint ends
with the same bits as one that was never stopped.
"""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError, NumericsError
from paceline.train import checkpoint
from paceline.train.estimate import Cost, measure
from paceline.train.log import Evaluated, Finished, Log, Saved, Stepped, Window
from paceline.train.loop import _accelerator
from paceline.train.recipe import Losses

_B = TypeVar("_B")
_FLOOR = 0.03


@dataclass(frozen=True)
class Begun:
    """Before the first step. cost: None where nothing is left to do."""

    steps: int
    resumed: bool
    cost: Cost | None


CourseEvent: TypeAlias = Begun | Stepped | Evaluated | Saved | Finished


@dataclass(frozen=True)
class Group:
    """Parameters with a peak learning rate."""

    parameters: Seq[nn.Parameter]
    lr: float


@dataclass(frozen=True)
class Schedule:
    """How to train. minutes: as many steps as fit, chosen once, before the first. evaluate_every, log_every: steps."""

    steps: int
    minutes: float | None
    warmup: int
    weight_decay: float
    clip: float
    checkpoint_seconds: float
    log_every: int
    evaluate_every: int


class Task(ABC, Generic[_B]):
    """What is learnt. A micro-batch is a thunk of data: it is made where it is used."""

    groups: Seq[Group]
    identity: dict[str, Any]
    """What must be the same for a run to go on; JSON values."""

    @abstractmethod
    def trained(self) -> dict[str, Tensor]:
        """Everything that changes, by name; checkpoints hold it, and loading copies into these very tensors."""

    @abstractmethod
    def lessons(self, step: int) -> Seq[Any]:
        """What the micro-batches of a step are made of."""

    @abstractmethod
    def batch(self, lesson: Any) -> _B:
        """One micro-batch, on the device."""

    @abstractmethod
    def weight(self, batch: _B) -> float:
        """How much it counts in the mean over the step."""

    @abstractmethod
    def columns(self, batch: _B) -> int:
        """Tokens that pass through the model."""

    @abstractmethod
    def loss(self, batch: _B) -> Losses:
        """Mean loss, and what to show."""

    @abstractmethod
    def evaluate(self) -> tuple[float, dict[str, float], list[float]]:
        """Loss, shares by name, and agreement with a teacher (empty without one), on what is held out."""


def rate(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate: rises over the warm-up while a cosine falls to 3%; `step` counts from 0."""
    falls = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / max(1, warmup)) * (_FLOOR + (1 - _FLOOR) * falls)


def follow(task: Task[Any], how: Schedule, folder: Path) -> Iterator[CourseEvent]:
    """Train in place, going on from the last checkpoint in `folder` where there is one.

    Raises `ConfigError` where the folder holds another run, `NumericsError` when a gradient is not finite.
    """
    return _Course(task, how, folder).events()


@final
class _Course:
    def __init__(self, task: Task[Any], how: Schedule, folder: Path):
        self.task, self.how, self.folder = task, how, folder
        self.parameters = [parameter for group in task.groups for parameter in group.parameters]
        self.device = self.parameters[0].device
        self.accelerator = _accelerator(self.device)
        self.shards, self.shard = self.accelerator.num_processes, self.accelerator.process_index
        chosen = [{"params": list(group.parameters), "lr": group.lr} for group in task.groups]
        self.optimizer = torch.optim.AdamW(chosen, betas=(0.9, 0.98), weight_decay=how.weight_decay)
        self.step = self.tokens = 0
        self.window = Window()

    def events(self) -> Iterator[CourseEvent]:
        """The whole run."""
        how, main = self.how, self.accelerator.is_main_process
        state = checkpoint.newest(self.folder)
        cost, steps = self._plan(state)
        resumed = self._resume(state, steps)
        log = Log(self.folder, self.step) if main else None
        yield Begun(steps, resumed, cost if self.step < steps else None)
        saved_at = window_at = time.monotonic()
        while self.step < steps:
            share = rate(self.step, steps, how.warmup)
            self._descend(share)
            if self.step % how.log_every == 0 or self.step == steps:
                seconds, window_at = time.monotonic() - window_at, time.monotonic()
                event = self.window.close(self.step, steps, self.tokens, share * self.task.groups[0].lr, seconds)
                self.window = Window()
                yield from self._told(log, event)
            if self.step % how.evaluate_every == 0 or self.step == steps:
                yield from self._told(log, self._evaluate())
            if self._agreed(time.monotonic() - saved_at >= how.checkpoint_seconds) or self.step == steps:
                yield Saved(self.step, self._save(steps))
                saved_at = time.monotonic()
        yield from self._told(log, Finished(self.step, self.tokens))

    def _told(self, log: Log | None, event: Stepped | Evaluated | Finished) -> Iterator[CourseEvent]:
        if log is not None:
            log.write(event)
        yield event

    def _descend(self, share: float) -> None:
        """One optimizer step over this device's micro-batches and everybody else's."""
        mine = [self.task.batch(lesson) for lesson in self.task.lessons(self.step)[self.shard :: self.shards]]
        weights = [self.task.weight(batch) for batch in mine]
        columns = sum(self.task.columns(batch) for batch in mine)
        total, columns = self._sums(sum(weights), columns)
        for batch, weight in zip(mine, weights, strict=True):
            with self.accelerator.autocast():
                losses = self.task.loss(batch)
            (losses.total * (weight / total)).backward()
            self.window.add(losses, cast("int", weight))  # it only sums them
        if self.shards > 1:
            for parameter in self.parameters:
                held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(held, "sum")  # type: ignore[assignment]
        norm = nn.utils.clip_grad_norm_(self.parameters, self.how.clip)
        if not bool(torch.isfinite(norm)):
            raise NumericsError(
                "the gradients are not finite", got=f"at step {self.step}",
                fix="lower the learning rate; the folder's last checkpoint is from before that",
            )  # fmt: skip
        for group, peak in zip(self.optimizer.param_groups, self.task.groups, strict=True):
            group["lr"] = peak.lr * share
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += round(columns)

    @torch.no_grad()
    def _evaluate(self) -> Evaluated:
        """On every device alike: it is short, and nobody waits for anybody."""
        loss, parts, agreement = self.task.evaluate()
        return Evaluated(self.step, self.tokens, loss, parts, agreement, 1 + sum(agreement[:1]))

    def _plan(self, state: dict[str, Any] | None) -> tuple[Cost, int]:
        """What the run takes, from one micro-batch whose gradients are thrown away, and how many steps it has."""
        lessons = self.task.lessons(0)
        batches = [self.task.batch(lesson) for lesson in lessons]
        columns = sum(self.task.columns(batch) for batch in batches)

        def once() -> None:
            with self.accelerator.autocast():
                self.task.loss(batches[0]).total.backward()
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        one_step = measure(once, self.task.columns(batches[0]), columns // self.shards)
        steps = self.how.steps
        if self.how.minutes is not None:
            fits = max(1, int(self.how.minutes * 60 / one_step.seconds))
            if state is None:
                steps = self._from_first(fits)
            else:
                with checkpoint.readable(self.folder):
                    steps = int(state["steps"])
        return replace(one_step, columns=one_step.columns * steps, flops=one_step.flops * steps), steps

    # Staying the same run

    def _identity(self, steps: int) -> dict[str, Any]:
        how = self.how
        settings = {"steps": steps, "warmup": how.warmup, "decay": how.weight_decay, "clip": how.clip}
        rates = [group.lr for group in self.task.groups]
        shapes = repr([tuple(p.shape) for p in self.parameters])
        told = {"settings": settings, "rates": rates, "shapes": shapes, "devices": self.shards, **self.task.identity}
        return json.loads(json.dumps(told))

    def _save(self, steps: int) -> Path:
        if not self.accelerator.is_main_process:
            return self.folder / f"checkpoint-{self.step:08d}.pt"
        state = {
            "identity": self._identity(steps), "trained": self.task.trained(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "steps": steps, "tokens": self.tokens, "window": self.window.sums(),
        }  # fmt: skip
        return checkpoint.save(self.folder, self.step, state)

    def _resume(self, state: dict[str, Any] | None, steps: int) -> bool:
        if state is None:
            return False
        with checkpoint.readable(self.folder):
            for key, value in self._identity(steps).items():
                if state["identity"].get(key) != value:
                    raise ConfigError(
                        f"{str(self.folder)!r} holds a run with other {key}", got=value,
                        expected=state["identity"].get(key),
                        fix="choose another out, or delete this folder to begin again",
                    )  # fmt: skip
            with torch.no_grad():
                for name, tensor in self.task.trained().items():
                    tensor.copy_(state["trained"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.tokens, self.window = int(state["step"]), int(state["tokens"]), Window.of(state["window"])
        return True

    def _sums(self, *values: float) -> list[float]:
        """Over all devices."""
        if self.shards == 1:
            return list(values)
        return self.accelerator.reduce(torch.tensor(values, device=self.device), "sum").tolist()  # type: ignore[union-attr]

    def _from_first(self, value: int) -> int:
        return round(self._sums(value if self.shard == 0 else 0)[0])

    def _agreed(self, due: bool) -> bool:
        """What the first device says, since clocks differ."""
        return bool(self._from_first(int(due)))
