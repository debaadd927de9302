"""A drafter that only lacks memory or a file is no error: the answer goes on without its draft."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from ..errors import CacheFull
from .interfaces import Drafter
from .request import TokenSequence

_log = logging.getLogger(__name__)
_LACKS = (CacheFull, MemoryError, torch.OutOfMemoryError, OSError)
_OF_TORCH = ("DefaultCPUAllocator", "_ALLOC_FAILED", "out of memory")  # in errors without a class of their own


@contextmanager
def spared(drafter: Drafter, seqs: Sequence[TokenSequence]) -> Generator[None]:
    """End the body where memory or a file fails the drafter, which then forgets these sequences.

    So there is no draft in this round; in the next one it begins again with their texts. Any other error is raised.
    """
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        level = logging.DEBUG if drafter.has_lacked else logging.WARNING
        _log.log(level, "the drafter %r cannot draft now, and answers go on without it: %s", drafter.name, error)
        drafter.has_lacked = True
        drafter.release([seq.slot for seq in seqs])


def is_shortage(error: Exception) -> bool:
    """Whether an error tells of missing memory or files, not of a fault of the drafter."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_TORCH):
        return True
    return isinstance(error, _LACKS)
