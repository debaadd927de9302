"""The training loop: one generator of events for every recipe, on one device or many, which a kill cannot harm.

    for event in train(recipe, answers, TrainConfig(), folder):   Started; Stepped, Evaluated and Saved; Finished

A step is `accumulate` batches on each device; its gradient is that of the mean over all answer tokens of the step,
however they are spread. Everything that happens is a function of (recipe, answers, config, devices), so a run that
goes on from a checkpoint ends with the same bits as one that was never stopped.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn

from ..errors import ConfigError, NumericsError
from . import checkpoint
from .config import TrainConfig
from .data import Answers
from .estimate import accepted_length, measure
from .extras import need
from .log import Evaluated, Event, Finished, Log, Saved, Started, Stepped, Window, learning_rate
from .recipe import Batch, Losses, Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

StatesOf: TypeAlias = Callable[[Batch, Sequence[int]], Batch]
"""Puts the target's states of the given layers into a batch that has none."""
_MOST_SKIPPED = 10


def train(
    recipe: Recipe,
    answers: Answers,
    config: TrainConfig,
    folder: Path | str,
    states_of: StatesOf | None = None,
    held_out: Answers | None = None,
) -> Iterator[Event]:
    """Train `recipe.module` in place, going on from the last checkpoint in `folder` where there is one.

    held_out: answers to evaluate on; None splits them off. states_of: for answers whose states were not stored.
    Raises `ConfigError` where the folder holds another run's checkpoint, `NumericsError` when the loss is not finite.
    """
    if held_out is None:
        answers, held_out = answers.split(config.held_out)
        answers = answers.limited(config.limit)
    return _Run(recipe, answers, held_out, config, Path(folder), states_of).events()


@final
class _Run:
    def __init__(
        self, recipe: Recipe, answers: Answers, held_out: Answers, config: TrainConfig, folder: Path,
        states_of: StatesOf | None,
    ):  # fmt: skip
        self.recipe, self.config, self.folder, self.states_of = recipe, config, folder, states_of
        self.answers, self.held_out = answers.fitting(config.max_tokens), held_out.fitting(config.max_tokens)
        if not len(self.answers):
            raise ConfigError(
                "there is nothing to train on", got=f"{len(answers)} answers", expected="more, or shorter"
            )
        if states_of is None and not self.answers.has_states:
            raise ConfigError("these answers were prepared without states", fix="pass states_of")
        recipe.check_sees(answers.has_pictures or held_out.has_pictures, answers.has_states and held_out.has_states)
        self.parameters = [p for p in recipe.module.parameters() if p.requires_grad]
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self.accelerator = _accelerator(self.device)
        self.shards, self.shard = self.accelerator.num_processes, self.accelerator.process_index
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.step = self.tokens = self.skipped = self._skipped_in_a_row = 0
        self.window = Window()

    def events(self) -> Iterator[Event]:
        """The whole run."""
        config, main = self.config, self.accelerator.is_main_process
        self._broadcast_weights()
        torch.manual_seed(config.seed + self.shard)
        plans = [self._steps_of(epoch) for epoch in range(config.epochs)]
        steps = sum(map(len, plans))
        columns = sum(self._columns(batch) for plan in plans for step in plan for batch in step)
        resumed = self._resume()
        log = Log(self.folder, self.step, config.tensorboard) if main else None
        cost = self._cost(plans[0][0], columns) if self.step < steps else None
        yield Started(steps, self.answers.num_tokens, len(self.answers), len(self.held_out), resumed, cost)
        saved_at, window_at = time.monotonic(), time.monotonic()
        ends = [sum(map(len, plans[: i + 1])) for i in range(config.epochs)]
        with ThreadPoolExecutor(1) as reader:
            for epoch, plan in enumerate(plans):
                todo = plan[max(0, self.step - (ends[epoch] - len(plan))) :]
                for batches, ready in _ahead(reader, todo, self._mine):
                    self._descend(batches, ready, learning_rate(config, self.step, steps))
                    if self.step % config.log_every == 0 or self.step == steps:
                        seconds, window_at = time.monotonic() - window_at, time.monotonic()
                        rate = learning_rate(config, self.step - 1, steps)
                        event = self.window.close(self.step, steps, self.tokens, rate, seconds)
                        self.window = Window()
                        yield from self._told(log, replace(event, skipped=self.skipped))
                    every = config.evaluate_every
                    at_epoch = self.step in ends if every is None else self.step == steps
                    if len(self.held_out) and (at_epoch or (every and self.step % every == 0)):
                        yield from self._told(log, self._evaluate())
                    due = self._agreed(time.monotonic() - saved_at >= config.checkpoint_seconds)
                    if due or self.step == steps:
                        yield Saved(self.step, self._save())
                        saved_at = time.monotonic()
        yield from self._told(log, Finished(self.step, self.tokens))

    def _told(self, log: Log | None, event: Stepped | Evaluated | Finished) -> Iterator[Event]:
        if log is not None:
            log.write(event)
        yield event

    # What a step consists of

    def _steps_of(self, epoch: int) -> list[list[list[int]]]:
        batches = self.answers.plan(self.config.max_tokens, self.config.seed, epoch)
        size = self.config.accumulate * self.shards
        return [batches[i : i + size] for i in range(0, len(batches), size)]

    def _columns(self, batch: list[int]) -> int:
        longest = max(self.answers.all[i].length for i in batch)
        return len(batch) * min(longest, self.config.max_tokens)

    def _mine(self, batches: list[list[int]]) -> list[tuple[int, Batch]]:
        """The batches of a step that are this device's, each with how many lessons it has."""
        most, layers = self.config.max_tokens, self.recipe.states
        mine = batches[self.shard :: self.shards]
        return [(self.answers.lessons(b, most), self.answers.batch(b, layers, most)) for b in mine]

    def _loss(self, batch: Batch) -> Losses:
        if not batch.states and self.recipe.states:
            assert self.states_of is not None
            batch = self.states_of(batch, self.recipe.states)
        states = {layer: state.to(self.device, self.dtype) for layer, state in batch.states.items()}
        ready = Batch(batch.token_ids.to(self.device), states, batch.is_answer.to(self.device), batch.chats)
        with self.accelerator.autocast():
            return self.recipe.loss(ready)

    def _descend(self, batches: list[list[int]], ready: list[tuple[int, Batch]], rate: float) -> None:
        """One optimizer step; gradients that are not finite are thrown away."""
        module = self.recipe.module.train()
        lessons = sum(self.answers.lessons(batch, self.config.max_tokens) for batch in batches)
        for own, batch in ready:
            losses = self._loss(batch)
            (losses.total * (own / lessons)).backward()
            self.window.add(losses, own)
        self._sum_gradients()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        if bool(torch.isfinite(norm)):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self.skipped, self._skipped_in_a_row = self.skipped + 1, self._skipped_in_a_row + 1
            if self._skipped_in_a_row == _MOST_SKIPPED:
                raise NumericsError(
                    "the gradients are not finite", got=f"{_MOST_SKIPPED} steps in a row",
                    fix="lower train.lr; the folder's last checkpoint is from before or during that",
                )  # fmt: skip
        module.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += lessons

    def _sum_gradients(self) -> None:
        if self.shards > 1:
            for parameter in self.parameters:
                held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(held, "sum")  # type: ignore[assignment]

    @torch.no_grad()
    def _evaluate(self) -> Evaluated:
        """Losses and agreement on the held-out answers, without touching the run's random numbers."""
        self.recipe.module.eval()
        window, most = Window(), self.config.max_tokens
        before = checkpoint.random_state()
        for batch in self.held_out.plan(most)[self.shard :: self.shards]:
            losses = self._loss(self.held_out.batch(batch, self.recipe.states, most))
            window.add(losses, self.held_out.lessons(batch, most))
        checkpoint.set_random_state(before)
        sums = window.sums()
        if self.shards > 1:
            from accelerate.utils import gather_object

            sums = Window.joined(gather_object([sums]))
        loss, parts, agreement = Window.means(sums)
        return Evaluated(self.step, self.tokens, loss, parts, agreement, accepted_length(agreement))

    def _cost(self, step: list[list[int]], columns: int) -> Any:
        """What the run takes, from a step whose gradients are thrown away."""
        before, mine = checkpoint.random_state(), self._mine(step[:1] * self.shards)

        def once() -> None:
            self._loss(mine[0][1]).total.backward()
            self.recipe.module.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        cost = measure(once, self._columns(step[0]), columns // self.shards)
        checkpoint.set_random_state(before)
        return cost

    # Staying the same run

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        c = self.config
        chosen = (c.epochs, c.max_tokens, c.lr, c.warmup, c.clip, c.weight_decay, c.accumulate, c.seed, dict(c.loss))
        return {
            "config": repr(chosen),
            "answers": self.answers.hash(),
            "recipe": f"{type(self.recipe).__name__} {self.recipe.identity}".rstrip(),
            "shapes": repr([tuple(p.shape) for p in self.parameters]),
            "module": self._module_identity,
            "devices": self.shards,
        }

    @property
    def _module_identity(self) -> str:
        """Shape of the module, and which tokens it can draft."""
        module: Any = self.recipe.module
        ids = getattr(module, "draft_ids", None)
        drafts = "" if ids is None else hashlib.sha256(repr(ids.tolist()).encode()).hexdigest()
        return f"{getattr(module, 'config', '')!r} {drafts}"

    def _save(self) -> Path:
        random_states: list[Any] = [checkpoint.random_state()]
        if self.shards > 1:
            from accelerate.utils import gather_object

            random_states = gather_object(random_states)
        state = {
            "identity": self._identity, "module": self.recipe.module.state_dict(),
            "optimizer": self.optimizer.state_dict(), "random": random_states, "step": self.step,
            "tokens": self.tokens, "skipped": self.skipped, "window": self.window.sums(),
        }  # fmt: skip
        path = self.folder / f"checkpoint-{self.step:08d}.pt"
        return checkpoint.save(self.folder, self.step, state) if self.accelerator.is_main_process else path

    def _resume(self) -> bool:
        state = checkpoint.newest(self.folder)
        if state is None:
            return False
        with checkpoint.readable(self.folder):
            for key, value in self._identity.items():
                if state["identity"][key] != value:
                    raise ConfigError(
                        f"{str(self.folder)!r} holds a run with other {key}", got=value,
                        expected=state["identity"][key], fix="choose another folder, or delete this one to begin again",
                    )  # fmt: skip
            self.recipe.module.load_state_dict(state["module"])
            self.optimizer.load_state_dict(state["optimizer"])
            checkpoint.set_random_state(state["random"][self.shard])
            self.step, self.tokens, self.skipped = (int(state[key]) for key in ("step", "tokens", "skipped"))
            self.window = Window.of(state["window"])
        return True

    def _broadcast_weights(self) -> None:
        if self.shards > 1:
            from accelerate.utils import broadcast

            for parameter in self.parameters:
                parameter.data.copy_(broadcast(parameter.data))  # type: ignore[arg-type]

    def _agreed(self, due: bool) -> bool:
        """What the first device says, since clocks differ."""
        if self.shards == 1:
            return due
        return bool(self.accelerator.reduce(torch.tensor(float(due and self.shard == 0), device=self.device), "sum"))


def _accelerator(device: torch.device) -> "Accelerator":
    """Accelerate on this device; bfloat16 arithmetic where the device has it."""
    Accelerator = need("accelerate", "training").Accelerator
    halves = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if halves else "no")


def _ahead(
    reader: ThreadPoolExecutor, steps: Sequence[list[list[int]]], read: Callable[[list[list[int]]], Any]
) -> Iterator[tuple[list[list[int]], Any]]:
    """Each step with its batches, the next one being read meanwhile."""
    waiting = [reader.submit(read, steps[0])] if steps else []
    for index, step in enumerate(steps):
        ready = waiting.pop().result()
        if index + 1 < len(steps):
            waiting.append(reader.submit(read, steps[index + 1]))
        yield step, ready
