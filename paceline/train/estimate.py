"""What a head would give while decoding, and what its training will take, before either is done."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ConfigError
from ..system.hardware import available_memory

_BYTES = 16  # of a parameter in training: itself, its gradient and AdamW's two means in float32


def accepted_length(agreement: Iterable[float]) -> float:
    """Estimated tokens a pass of the target, the target's own token included, when a chain is drafted greedily.

    1 + a_1 + a_1 a_2 + ... + a_1 ... a_D, where a_d is the share of draft step d that agrees, given that the steps
    before it did.
    """
    total = reached = 1.0
    for share in agreement:
        reached *= share
        total += reached
    return total


@dataclass(frozen=True)
class TrainingCost:
    """What a training run takes. flops: forward and backward over all tokens. seconds: at the speed just measured."""

    columns: int
    flops: float
    flops_per_s: float

    @property
    def seconds(self) -> float:
        """Wall-clock time."""
        return self.flops / self.flops_per_s

    def __str__(self) -> str:
        hours, minutes = divmod(round(self.seconds / 60), 60)
        time_of_it = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{self.seconds:.0f} s"
        return (
            f"{self.columns / 1e6:.2f} M tokens x {self.flops / self.columns / 1e6:.1f} MFLOP"
            f" at {self.flops_per_s / 1e9:.1f} GFLOP/s: about {time_of_it}"
        )


def measure(one_step: Callable[[], None], columns_of_step: int, columns: int) -> TrainingCost:
    """Count the operations of one step, then time another like it; `columns`: of the whole run."""
    with FlopCounterMode(display=False) as counter:  # also warms up
        one_step()
    flops = max(1, counter.get_total_flops())
    begin = time.perf_counter()
    one_step()
    seconds = max(time.perf_counter() - begin, 1e-9)
    return TrainingCost(columns, flops / columns_of_step * columns, flops / seconds)


def check_memory(parameters: int, what: str, device: torch.device, fix: str) -> None:
    """Raise `ConfigError` where training so many parameters needs more memory than is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if free is not None and _BYTES * parameters > free:
        raise ConfigError(
            f"training {what} needs more memory than is free", got=f"{_BYTES * parameters / 2**30:.1f} GiB",
            expected=f"at most {free / 2**30:.1f} GiB", fix=fix,
        )  # fmt: skip


def size_of(make: Callable[[], nn.Module]) -> int:
    """Number of parameters of a module, which is made without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())
