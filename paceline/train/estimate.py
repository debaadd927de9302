"""What a head would give while decoding, and the memory that its training takes, before either is done."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

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
