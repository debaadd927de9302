"""A CUDA graph in miniature, on any device: operations recorded once with their addresses, then repeated blindly."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Each of these reads a value back to the host, so that a device would have to be waited for.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique",
    "repeat_interleave.Tensor",
)


class Tape(TorchDispatchMode):
    """Records what runs inside; `replay` repeats it in place, without running any of the Python around it."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @property
    def waits(self) -> list[str]:
        """Names of recorded operations that read back from the device."""
        names = [str(func).removeprefix("aten.") for func, *_ in self.calls]
        by_mask = [
            str(func)
            for func, args, *_ in self.calls
            if "index" in str(func) and len(args) > 1 and isinstance(args[1], list | tuple)
            if any(isinstance(i, Tensor) and i.dtype is torch.bool for i in args[1])
        ]
        return [name for name in names if name.startswith(WAITING)] + by_mask

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # a view, or written in place, is where it was
                    old.copy_(new)


def _tensors(value) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, Tensor)]


def recorded(tapes: list[Tape]) -> Callable[[Callable[[], object], torch.device], Callable[[], object]]:
    """Stands in for a function that captures a graph of `work`; every tape made is appended to `tapes`."""

    def repeatable(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
        tape = Tape()
        with tape:
            out = work()
        tapes.append(tape)

        def replay() -> object:
            tape.replay()
            return out

        return replay

    return repeatable
