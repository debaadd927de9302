"""What a training run tells: its events, their means over a window of steps, and a file with one JSON line for each."""

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from ..schema import validate
from ..system.files import parse_json, read_text, write_text
from .config import TrainConfig
from .estimate import Cost
from .extras import need
from .recipe import Losses
from .run_folder import understood


@dataclass(frozen=True)
class Started:
    """Before the first step. tokens: answer tokens of one epoch. cost: None where nothing is left to do."""

    steps: int
    tokens: int
    answers: int
    held_out: int
    resumed: bool
    cost: Cost | None


@dataclass(frozen=True)
class Stepped:
    """Means over the steps since the last such event. tokens: answer tokens seen so far; tokens_per_s: of those."""

    step: int
    steps: int
    tokens: int
    loss: float
    parts: dict[str, float]
    agreement: list[float]
    lr: float
    tokens_per_s: float
    skipped: int = 0


@dataclass(frozen=True)
class Evaluated:
    """On held-out answers. accepted_length: the offline estimate for a greedy chain."""

    step: int
    tokens: int
    loss: float
    parts: dict[str, float]
    agreement: list[float]
    accepted_length: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint stands."""

    step: int
    path: Path


@dataclass(frozen=True)
class Finished:
    """The module is trained."""

    step: int
    tokens: int


Event: TypeAlias = Started | Stepped | Evaluated | Saved | Finished
_LOGGED = {"step": Stepped, "evaluation": Evaluated, "finish": Finished}


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Rises to its peak over the warm-up, then falls along a cosine to a tenth of it; `step` counts from 0."""
    rise = max(1, round(config.warmup * steps))
    if step < rise:
        return config.lr * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@final
class Window:
    """Sums over some batches, weighted by their answer tokens; kept on the device until someone asks."""

    def __init__(self) -> None:
        self.weight = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, losses: Losses, weight: int) -> None:
        """Count one batch of `weight` lessons."""
        self.weight += weight
        # A recipe may leave a step out of a batch: its agreement is NaN, and counts for nothing.
        told = {"loss": losses.total.detach(), "agreement": losses.agreement.nan_to_num(0.0)}
        told["measured"] = losses.agreement.isfinite()
        told |= {f"part {name}": value for name, value in losses.parts.items()}
        for name, value in told.items():
            new = value.float() * weight
            self._sums[name] = self._sums[name].to(new.device) + new if name in self._sums else new

    def sums(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint or for another process."""
        return {"weight": self.weight, **{name: value.tolist() for name, value in self._sums.items()}}

    @classmethod
    def of(cls, sums: Mapping[str, Any]) -> "Window":
        """The window whose `sums` these are."""
        window = cls()
        window.weight = sums["weight"]
        window._sums = {name: torch.tensor(value) for name, value in sums.items() if name != "weight"}
        return window

    @staticmethod
    def joined(many: Seq[Mapping[str, Any]]) -> dict[str, Any]:
        """Sums of several processes together; one that saw no batch has none."""
        names = {name: None for one in many for name in one}
        total: dict[str, Any] = {}
        for name in names:
            rows = [torch.tensor(one[name], dtype=torch.float64) for one in many if name in one]
            total[name] = torch.stack(rows).sum(0).tolist()
        return total

    @staticmethod
    def means(sums: Mapping[str, Any]) -> tuple[float, dict[str, float], list[float]]:
        """Loss, parts and agreement of each depth."""
        weight = max(1, sums["weight"])
        parts = {n.removeprefix("part "): float(v) / weight for n, v in sums.items() if n.startswith("part ")}
        pairs = zip(sums.get("agreement", []), sums.get("measured", []), strict=True)
        agreement = [share / of if of else 0.0 for share, of in pairs]
        return float(sums.get("loss", 0)) / weight, parts, agreement

    def close(self, step: int, steps: int, tokens: int, lr: float, seconds: float) -> Stepped:
        """The event of this window."""
        loss, parts, agreement = self.means(self.sums())
        return Stepped(step, steps, tokens, loss, parts, agreement, lr, self.weight / max(seconds, 1e-9))


def need_tensorboard() -> ModuleType:
    """What writes TensorBoard's files. Raises `ConfigError` where it is not installed."""
    return need("torch.utils.tensorboard", "train.tensorboard", "pip install tensorboard")


@final
class Log:
    """`log.jsonl` of a run, and TensorBoard's files beside it where they are asked for."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "log.jsonl"
        lines = read_log(folder)
        # A run that goes on tells again what came after its checkpoint.
        kept = [line for line in lines if line["step"] <= step and line["event"] != "finish"]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board: Any = None
        if tensorboard:
            self._board = need_tensorboard().SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, event: Stepped | Evaluated | Finished) -> None:
        """One line."""
        kind = next(name for name, of in _LOGGED.items() if isinstance(event, of))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": kind, **asdict(event)}) + "\n")
        if self._board is not None:
            for name, value in asdict(event).items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, event.step)
            self._board.flush()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's log, without a last one that a kill cut short. Raises `ConfigError`."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    lines = list[dict[str, Any]]()
    with understood(f"the log {str(path)!r}", "remove the lines that are damaged, or the file"):
        for number, text in enumerate(read_text(path, "the log").split("\n")[:-1], start=1):
            lines.append(parse_json(text, where := f"line {number} of {str(path)!r}"))
            validate(_LOGGED[lines[-1]["event"]], lines[-1], where)
    return lines
