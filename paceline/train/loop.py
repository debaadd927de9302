"""The training loop: a generator of events for any task, on one device or several, resumable after a kill.

    for event in train(task, LoopConfig(), folder):   Started; Stepped, Evaluated and Saved; Finished

A step is a number of micro-batches, distributed over the devices; its gradient is that of their weighted mean.
Everything is a function of (task, config, devices), so a resumed run ends with the same bits as an uninterrupted one.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ..errors import NumericsError
from ..system.files import replacing
from ..system.hardware import cpu_flags
from .config import LoopConfig
from .log import Evaluated, Finished, Log, Saved, Started, Stepped, TrainEvent, Window, accepted_length
from .muon import Muon
from .recipe import Losses
from .run_folder import check_same, need, understood

if TYPE_CHECKING:
    from accelerate import Accelerator

_B = TypeVar("_B")
_MAX_SKIPPED = 10
"""Consecutive steps that may be skipped because their gradients are not finite."""


class Task(ABC, Generic[_B]):
    """A module and its data, as the loop needs them. A micro-batch is loaded from an item."""

    module: nn.Module
    """The trained module; by default its state is saved in checkpoints."""
    identity: Mapping[str, Any]
    """What must be the same for a run to be resumed; JSON values."""
    data: Mapping[str, int]
    """Counts of the training data, for the first event."""
    held_out: Sequence[Any] = ()
    """Items to evaluate on."""

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Trained parameters, each group with its share of the learning rate."""
        return [([p for p in self.module.parameters() if p.requires_grad], 1.0)]

    def input_scales(self) -> Mapping[nn.Parameter, Tensor]:
        """Matrices whose inputs differ in size, with the root mean square of each input."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Everything that changes, by name; loading a checkpoint copies into these very tensors."""
        return self.module.state_dict()

    @abstractmethod
    def num_steps(self, devices: int) -> int:
        """Steps of the whole run."""

    @abstractmethod
    def items(self, step: int, devices: int) -> Sequence[Any]:
        """The items of a step, of all devices together."""

    @abstractmethod
    def load(self, item: Any) -> _B:
        """One micro-batch, in the memory of the CPU; called ahead, in a thread."""

    @abstractmethod
    def weight(self, batch: _B) -> float:
        """Its weight in the mean over the step, for example its supervised tokens."""

    @abstractmethod
    def loss(self, batch: _B) -> Losses:
        """The mean of the micro-batch."""

    def is_epoch_end(self, step: int, devices: int) -> bool:
        """Whether an epoch ends after this step; without `evaluate_every` the loop evaluates then."""
        return False


def train(task: Task[Any], config: LoopConfig, folder: Path | str) -> Iterator[TrainEvent]:
    """Train `task.module` in place, resuming from the last checkpoint in `folder` if there is one.

    Raises `ConfigError` where the folder has another run's checkpoint, `NumericsError` after ten consecutive steps with
    gradients that are not finite.
    """
    return _Run(task, config, Path(folder)).events()


def learning_rate(config: LoopConfig, step: int, steps: int) -> float:
    """Rises to its peak over the warm-up, then falls along a cosine to a tenth of it; `step` counts from 0."""
    rise = max(1, round(config.warmup * steps))
    if step < rise:
        return config.lr * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def multiplies_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for it. Weights, gradients and moments stay in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return device.type == "cpu" and "AVX-512-BF16" in cpu_flags()


@final
class _Run:
    def __init__(self, task: Task[Any], config: LoopConfig, folder: Path):
        self.task, self.config, self.folder = task, config, folder
        self.groups = task.groups()
        self.parameters = [parameter for group, _ in self.groups for parameter in group]
        self.device = self.parameters[0].device
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, multiplies_in_bfloat16(self.device))
        make = need("accelerate", "training").Accelerator
        self.accelerator: Accelerator = make(cpu=self.device.type == "cpu")
        self.devices, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.steps = task.num_steps(self.devices)
        groups: Any = [{"params": group} for group, _ in self.groups]
        options: Any = {"lr": config.lr, "betas": (0.9, 0.95), "weight_decay": config.weight_decay}
        is_muon, scales = config.optimizer == "muon", task.input_scales()
        self.optimizer = Muon(groups, input_scales=scales, **options) if is_muon else AdamW(groups, **options)
        self.step = self.tokens = self.skipped = self._skipped_in_a_row = 0
        self.window = Window()

    def events(self) -> Iterator[TrainEvent]:
        config, steps = self.config, self.steps
        self._broadcast_weights()
        torch.manual_seed(config.seed + self.rank)
        resumed = self._resume()
        log = Log(self.folder, self.step, config.tensorboard) if self.accelerator.is_main_process else None
        yield Started(steps, self.task.data, resumed)
        saved_at, window_at = time.monotonic(), time.monotonic()
        for batches in _ahead(range(self.step, steps), self._load):
            rate = learning_rate(config, self.step, steps)
            self._descend(batches, rate)
            if self.step % config.log_every == 0 or self.step == steps:
                window = Window(*self._gather(self.window.sums()))
                pace = window.weight / max(time.monotonic() - window_at, 1e-9)
                self.window, window_at = Window(), time.monotonic()
                stepped = Stepped(self.step, steps, self.tokens, *window.means(), rate, pace, self.skipped)
                yield from self._logged(log, stepped)
            if self._evaluates():
                yield from self._logged(log, self._evaluate())
            due = self.rank == 0 and time.monotonic() - saved_at >= config.checkpoint_seconds  # clocks differ
            if self._sum(float(due)) or self.step == steps:
                yield Saved(self.step, self._save())
                saved_at = time.monotonic()
        yield from self._logged(log, Finished(self.step, self.tokens))

    def _logged(self, log: Log | None, event: Stepped | Evaluated | Finished) -> Iterator[TrainEvent]:
        if log is not None:
            log.write(event)
        yield event

    def _load(self, step: int) -> list[Any]:
        return [self.task.load(item) for item in self.task.items(step, self.devices)[self.rank :: self.devices]]

    def _loss(self, batch: Any) -> Losses:
        with self.autocast:
            return self.task.loss(batch)

    def _descend(self, batches: list[Any], rate: float) -> None:
        """One optimizer step; it is skipped if a gradient is not finite."""
        self.task.module.train()
        weights = [self.task.weight(batch) for batch in batches]
        total = self._sum(sum(weights))
        for weight, batch in zip(weights, batches, strict=True):
            losses = self._loss(batch)
            (losses.total * (weight / total)).backward()
            self.window.add(losses, weight)
        for parameter in self.parameters if self.devices > 1 else ():
            held = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(held, "sum")  # type: ignore[assignment]
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        if bool(torch.isfinite(norm)):
            for group, (_, share) in zip(self.optimizer.param_groups, self.groups, strict=True):
                group["lr"] = rate * share
            with self.autocast:  # for Muon's products
                self.optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self.skipped, self._skipped_in_a_row = self.skipped + 1, self._skipped_in_a_row + 1
            if self._skipped_in_a_row == _MAX_SKIPPED:
                raise NumericsError(
                    "the gradients are not finite", got=f"{_MAX_SKIPPED} steps in a row",
                    fix="lower the learning rate; the folder's last checkpoint is from before or during that",
                )  # fmt: skip
        self.task.module.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += round(total)

    def _evaluates(self) -> bool:
        every = self.config.evaluate_every
        due = self.step % every == 0 if every else self.task.is_epoch_end(self.step, self.devices)
        return bool(len(self.task.held_out)) and (due or self.step == self.steps)

    @torch.no_grad()
    def _evaluate(self) -> Evaluated:
        """Losses and agreement on the held-out items, without touching the run's random numbers."""
        self.task.module.eval()
        window = Window()
        with torch.random.fork_rng():
            for item in self.task.held_out[self.rank :: self.devices]:
                batch = self.task.load(item)
                window.add(self._loss(batch), self.task.weight(batch))
        loss, parts, agreement = Window(*self._gather(window.sums())).means()
        return Evaluated(self.step, self.tokens, loss, parts, agreement, accepted_length(agreement))

    # Checkpoints

    def _identity(self) -> dict[str, Any]:
        keys = ("optimizer", "lr", "warmup", "clip", "weight_decay", "seed")
        settings = {key: getattr(self.config, key) for key in keys}
        shares, shapes = [share for _, share in self.groups], [tuple(parameter.shape) for parameter in self.parameters]
        run_settings = {"steps": self.steps, "rates": shares, "shapes": repr(shapes), "devices": self.devices}
        return {**settings, **self.task.identity, **run_settings}

    def _save(self) -> Path:
        """Write the state of the run, then drop all but the last two checkpoints."""
        path = self.folder / f"checkpoint-{self.step:08d}.pt"
        random_states = self._gather({"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()})
        window = Window(*self._gather(self.window.sums()))
        if not self.accelerator.is_main_process:
            return path
        state = {
            "identity": self._identity(), "trained": self.task.state(), "optimizer": self.optimizer.state_dict(),
            "random": random_states, "step": self.step, "tokens": self.tokens, "skipped": self.skipped,
            "window": window.sums(),
        }  # fmt: skip
        with replacing(path) as part:
            torch.save(state, part)
        killed = self.folder.glob(".checkpoint-*.part")  # half-written
        for old in [*_all(self.folder)[:-2], *killed]:
            old.unlink()
        return path

    def _resume(self) -> bool:
        """Continue from the last checkpoint, where there is one. Raises `ConfigError` for one that cannot be read."""
        saved = _all(self.folder)
        if not saved:
            return False
        with understood(f"the checkpoint {str(saved[-1])!r}", "delete it, and the run continues from the one before"):
            state = torch.load(saved[-1], map_location="cpu", weights_only=True)
            fix = "choose another folder, or delete this one to begin again"
            check_same(f"the run in {str(self.folder)!r}", state["identity"], self._identity(), fix)
            with torch.no_grad():
                for name, tensor in self.task.state().items():
                    tensor.copy_(state["trained"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"][self.rank]["torch"])
            torch.cuda.set_rng_state_all(state["random"][self.rank]["cuda"])  # none without CUDA
            self.step, self.tokens, self.skipped = (int(state[key]) for key in ("step", "tokens", "skipped"))
            self.window = Window(state["window"]) if self.rank == 0 else Window()
        return True

    # Several devices

    def _broadcast_weights(self) -> None:
        if self.devices > 1:
            from accelerate.utils import broadcast

            for parameter in self.parameters:
                parameter.data.copy_(broadcast(parameter.data))  # type: ignore[arg-type]

    def _gather(self, value: Any) -> list[Any]:
        """The values of all devices."""
        from accelerate.utils import gather_object

        return gather_object([value])

    def _sum(self, value: float) -> float:
        if self.devices == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(float(value), device=self.device), "sum"))  # type: ignore[arg-type]


def _ahead(steps: Iterable[int], load: Callable[[int], list[Any]]) -> Iterator[list[Any]]:
    """The micro-batches of each step; those of the next step are loaded in the background."""
    with ThreadPoolExecutor(1) as reader:
        jobs = (reader.submit(load, step) for step in steps)
        waiting = next(jobs, None)
        while waiting is not None:
            coming = next(jobs, None)
            yield waiting.result()
            waiting = coming


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-" + "[0-9]" * 8 + ".pt"))
