"""The events of a training run, their means over a window of steps, and a log file with one JSON line for each."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from ..measure.plots import new_figure, save_figure
from ..schema import validate
from ..system.files import parse_json, read_text, write_text
from .recipe import Losses
from .run_folder import need, understood


@dataclass(frozen=True)
class Started:
    """The run starts. data: counts of the training data."""

    steps: int
    data: Mapping[str, int]
    resumed: bool


@dataclass(frozen=True)
class Stepped:
    """Means over the steps since the last such event. tokens: supervised tokens so far."""

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
    """Means over the held-out data. accepted_length: the offline estimate for a greedy chain."""

    step: int
    tokens: int
    loss: float
    parts: dict[str, float]
    agreement: list[float]
    accepted_length: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    path: Path


@dataclass(frozen=True)
class Finished:
    """The module is trained."""

    step: int
    tokens: int


def accepted_length(agreement: Iterable[float]) -> float:
    """Estimated tokens per pass of the target, the target's own token included, for a greedy chain.

    1 + a_1 + a_1 a_2 + ... + a_1 ... a_D, where a_d is the share of draft step d that agrees, given that the steps
    before it did.
    """
    total = reached = 1.0
    for share in agreement:
        reached *= share
        total += reached
    return total


TrainEvent: TypeAlias = Started | Stepped | Evaluated | Saved | Finished
_LOGGED = {"step": Stepped, "evaluation": Evaluated, "finish": Finished}


@final
class Window:
    """Weighted sums over some batches of every value, kept on the device until they are read.

    Each value has its own weight: a batch without a part, or with NaN in an agreement, has weight 0 for it.
    """

    def __init__(self, *sums: Mapping[str, Any]):
        """sums: of other windows to combine; empty for a window without batches."""
        self._sums: dict[str, Tensor] = {}  # [2, ...]
        for window in sums:
            for name, pair in window.items():
                self._add(name, torch.tensor(pair))

    def add(self, losses: Losses, weight: float) -> None:
        values = {"loss": losses.total.detach(), "agreement": losses.agreement}
        for name, value in (values | {f"part {name}": value for name, value in losses.parts.items()}).items():
            value = value.float()
            self._add(name, torch.stack([value.nan_to_num(0.0), (~value.isnan()).float()]) * weight)

    def _add(self, name: str, pair: Tensor) -> None:
        self._sums[name] = self._sums[name].to(pair.device) + pair if name in self._sums else pair

    def sums(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint or for another process."""
        return {name: pair.tolist() for name, pair in self._sums.items()}

    def means(self) -> tuple[float, dict[str, float], list[float]]:
        """Loss, parts and the agreement of each depth."""
        averages: dict[str, Any] = {}
        for name, pair in self._sums.items():
            sums, weights = pair.cpu()
            averages[name] = (sums / weights.clamp_min(1e-30)).tolist()
        parts = {name.removeprefix("part "): value for name, value in averages.items() if name.startswith("part ")}
        return averages.get("loss", 0.0), parts, averages.get("agreement", [])

    @property
    def weight(self) -> float:
        return float(self._sums["loss"][1]) if self._sums else 0.0


def need_tensorboard() -> Any:
    """The library that writes TensorBoard's files. Raises `ConfigError` where it is not installed."""
    return need("torch.utils.tensorboard", "train.tensorboard", "pip install tensorboard")


@final
class Log:
    """`log.jsonl` of a run, and TensorBoard's files beside it if `train.tensorboard` is set."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "log.jsonl"
        # A resumed run writes the lines after its checkpoint again.
        kept = [line for line in read_log(folder) if line["step"] <= step and line["event"] != "finish"]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._board: Any = None
        if tensorboard:
            self._board = need_tensorboard().SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, event: Stepped | Evaluated | Finished) -> None:
        kind = next(name for name, of in _LOGGED.items() if isinstance(event, of))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": kind, **asdict(event)}) + "\n")
        if self._board is not None:
            for name, value in asdict(event).items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, event.step)
            self._board.flush()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, without a last one that a kill cut short. Raises `ConfigError`."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    lines = list[dict[str, Any]]()
    with understood(f"the log {str(path)!r}", "remove the lines that are damaged, or the file"):
        for number, text in enumerate(read_text(path, "the log").split("\n")[:-1], start=1):
            lines.append(parse_json(text, where := f"line {number} of {str(path)!r}"))
            validate(_LOGGED[lines[-1]["event"]], lines[-1], where)
    return lines


def draw(folder: Path, path: Path) -> None:
    """Plot the estimated accepted length against the answer tokens seen, where matplotlib is installed."""
    points = [(line["tokens"], line["accepted_length"]) for line in read_log(folder) if line["event"] == "evaluation"]
    if not points or find_spec("matplotlib") is None:
        return
    figure, axes = new_figure(4.0)
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
    axes.set(xlabel="answer tokens seen", ylabel="estimated accepted length")
    axes.grid(alpha=0.3)
    save_figure(figure, path, "paceline train")
