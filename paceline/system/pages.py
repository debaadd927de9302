"""Memory that is taken page by page, when it is written, and given back in pieces."""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_DONTNEED, _NOHUGEPAGE, _NORESERVE = 4, 15, 0x4000  # of Linux; after the first, private pages read as zeros again


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages take memory once they are written; elsewhere than on Linux at once."""
    count = math.prod(shape)
    if _LIBC is None or not count:
        return torch.zeros(*shape, dtype=dtype)
    area = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with suppress(OSError):  # a kernel without huge pages
        area.madvise(_NOHUGEPAGE)  # one would hold columns that nobody has written
    return torch.frombuffer(area, dtype=torch.uint8).view(dtype).view(*shape)


def free_pages(tensor: Tensor) -> bool:
    """Set a contiguous part of `lazy_zeros` to zero by giving its pages back; False where that is not possible."""
    if _LIBC is None:
        return False
    begin, size = tensor.data_ptr(), tensor.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        tensor.zero_()
        return True
    whole = tensor.view(-1).view(torch.uint8)
    whole[: first - begin] = 0
    whole[last - begin :] = 0
    return not _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)
