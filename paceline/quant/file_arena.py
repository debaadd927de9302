"""Memory for weights that need not all be resident: a temporary file, of which the system reads what is used."""

import logging
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.build import cache_folder
from ..system.hardware import available_memory
from .packed import WeightArena

_LOG = logging.getLogger("paceline")
_PIECE = 64 << 20
ExpertsIn: TypeAlias = Literal["auto", "memory", "disk"]
"""Where packed experts lie; "auto": on disk where a model is larger than the available memory."""


class FileArena(WeightArena):
    """Contiguous memory in a file of the cache that has no name: it is gone with the process, however that ends.

    Raises OSError where there is no room.
    """

    def __init__(self):
        super().__init__()
        self.folder = cache_folder("experts")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file, self._size = tempfile.TemporaryFile(dir=self.folder), 0  # noqa: SIM115
        self._written: tuple[mmap.mmap, int] | None = None

    def _memory(self, size: int) -> Tensor:
        self._give_back()
        size = -(-max(size, _PIECE) // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(self._file.fileno(), self._size, size)  # or a full disk would end the process later
        else:
            self._file.truncate(self._size + size)
        piece = mmap.mmap(self._file.fileno(), size, offset=self._size)
        piece.madvise(mmap.MADV_RANDOM)  # kernels say what they are about to read
        self._written, self._size = (piece, self._size), self._size + size
        return torch.frombuffer(piece, dtype=torch.uint8)

    def _give_back(self) -> None:
        """Write the piece that was filled, and let the system have its pages."""
        if self._written is not None:
            piece, start = self._written
            piece.flush()
            piece.madvise(mmap.MADV_DONTNEED)
            with suppress(OSError, AttributeError):
                os.posix_fadvise(self._file.fileno(), start, len(piece), os.POSIX_FADV_DONTNEED)
            self._written = None

    def close(self) -> None:
        """Nothing more is placed; what was stays mapped."""
        super().close()
        self._give_back()
        self._file.close()


def expert_arena(name: str, where: ExpertsIn | None, size: int, of_experts: int) -> WeightArena:
    """The arena for the experts of a model, with a warning where that is a file.

    size: bytes of all its weights. of_experts: of those of its experts, 0 if it has none.
    Raises `ConfigError` for a model without experts that is to have them on disk, and where there is no room.
    """
    free = available_memory()
    if where == "disk" and not of_experts:
        raise no_experts(name)
    if where == "memory" or not of_experts or (where != "disk" and size <= free):
        return WeightArena()
    arena = FileArena()
    if (room := shutil.disk_usage(arena.folder).free) < of_experts:
        raise ConfigError(
            f"the experts of {name!r} fit neither into memory nor on the disk" if where != "disk" else
            f"the experts of {name!r} do not fit on the disk",
            got=f"{room / 1e9:.1f} GB free in {arena.folder}", expected=f"{of_experts / 1e9:.1f} GB",
            fix="set PACELINE_CACHE to a folder on a larger disk",
        )  # fmt: skip
    _LOG.warning(
        "%s has %.1f GB of weights, and %.1f GB of memory are available: its experts, %.1f GB, lie in a temporary file "
        "in %s, from which they are read as they are used.",
        *(name, size / 1e9, free / 1e9, of_experts / 1e9, arena.folder),
    )  # fmt: skip
    return arena


def no_experts(name: str) -> ConfigError:
    """The error for a model whose experts cannot be on the disk."""
    return ConfigError(
        f"the weights of {name!r} cannot lie on the disk", got="no experts that native passes of a CPU run",
        expected="a mixture of experts", fix='leave experts_in out, or give "auto"',
    )  # fmt: skip
