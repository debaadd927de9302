"""A CUDA graph in miniature, on the CPU: operations and kernels recorded once with their addresses, then repeated."""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

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
        self.num_launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def __enter__(self):
        launch = InterpretedFunction.run

        def run(kernel, *args, **options):
            with _disable_current_modes():
                launch(kernel, *args, **options)
            self.num_launches += 1
            self.calls.append((launch, (kernel, *args), options, None))

        self._launches = patch.object(InterpretedFunction, "run", run)
        self._launches.start()
        return super().__enter__()

    def __exit__(self, *raised):
        self._launches.stop()
        return super().__exit__(*raised)

    @property
    def waits(self) -> list[str]:
        """Names of recorded operations that read back from the device."""
        operations = [(str(func).removeprefix("aten."), args) for func, args, _, out in self.calls if out is not None]
        by_mask = [
            name
            for name, args in operations
            if "index" in name and len(args) > 1 and isinstance(args[1], list | tuple)
            if any(isinstance(i, Tensor) and i.dtype is torch.bool for i in args[1])
        ]
        return [name for name, _ in operations if name.startswith(WAITING)] + by_mask

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # a view, or written in place, is where it was
                    old.copy_(new)


def _tensors(value) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, Tensor)]


def recorded(tapes: list[Tape]) -> Callable[[Callable[[], object], torch.device], Callable[[], None]]:
    """Stands in for `graphs.Repeated`: the first time is recorded; every tape made is appended to `tapes`."""

    def repeated(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
        made: list[Tape] = []

        def run() -> None:
            if made:
                return made[0].replay()
            with Tape() as tape:
                work()
            made.append(tape)
            tapes.append(tape)

        return run

    return repeated
