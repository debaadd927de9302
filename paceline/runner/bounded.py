"""A mapping that holds no more bytes than it may: what was used longest ago goes first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@final
class Bounded(Generic[Key, Value]):
    """Values by key, at most `max_bytes` in all, measured by `size`; one that is larger by itself is not kept."""

    def __init__(self, max_bytes: int, size: Callable[[Value], int]):
        self.max_bytes, self.num_bytes, self._size = max_bytes, 0, size
        self._held: OrderedDict[Key, Value] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Value | None:
        """What is held under the key, which is now the most recent; None where there is nothing."""
        if key not in self._held:
            self.misses += 1
            return None
        self.hits += 1
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: Key, value: Value) -> None:
        """Hold the value, in the place of an older one of that key."""
        self.drop(key)
        size = self._size(value)
        if size > self.max_bytes:
            return
        while self.num_bytes + size > self.max_bytes:
            self.drop(next(iter(self._held)))
        self._held[key] = value
        self.num_bytes += size

    def drop(self, key: Key) -> None:
        """Forget one; harmless where it is not held."""
        if key in self._held:
            self.num_bytes -= self._size(self._held.pop(key))

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()
        self.num_bytes = 0
