"""What a loaded model takes, and how its memory goes back to the system."""

import gc
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor, nn

from ..async_llm import AsyncLLM
from ..attention.kv_cache import SlotCache
from ..system.hardware import return_free_memory


def return_memory() -> None:
    """Free what unloaded models held; their objects refer to each other."""
    gc.collect()
    return_free_memory()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def watched() -> Iterator[list[int]]:
    """The most bytes that the body has taken so far, as the only item: of a GPU where one is used. By samples."""
    begin, most, is_over = _taken(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], _taken() - begin)

    watching = threading.Thread(target=watch, name="paceline-memory", daemon=True)
    watching.start()
    try:
        yield most
    finally:
        is_over.set()
        watching.join()


def _taken() -> int:
    """Without files that are mapped: their pages go when they must."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    info = psutil.Process().memory_info()
    return info.rss - getattr(info, "shared", 0)


def growing_bytes(engine: AsyncLLM) -> int:
    """The bytes of its caches and adapters."""
    runner = engine.llm.runner
    return runner.cache.num_bytes + runner.prefixes.num_bytes + runner.adapters.num_bytes


def storages(*roots: object) -> dict[int, int]:
    """The bytes of all tensors that these objects hold, by their address; of a cache what it takes now, as one."""
    seen, found, stack = set[int](), dict[int, int](), list[object](roots)
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, SlotCache):
            found[id(one)] = one.num_bytes
        else:
            stack += _parts(one)
    return found


def _parts(one: object) -> Iterator[object]:
    """What a collection, a module or an object of this package holds."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | deque):
        yield from one
    elif isinstance(one, nn.Module) or type(one).__module__.partition(".")[0] == "paceline":
        yield from getattr(one, "__dict__", {}).values()
        yield from (getattr(one, name, None) for name in getattr(type(one), "__slots__", ()))
