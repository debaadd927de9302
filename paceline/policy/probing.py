"""When to try again what did not pay: now and then, and ever more seldom."""

from dataclasses import dataclass
from typing import final

WAIT, SHORTEST, LONGEST = 4, 2, 64  # rounds


@dataclass(slots=True)
class _Patience:
    last: int  # round of the last use
    wait: int = 0  # not tried yet


@final
class Probing:
    """Exponential back-off for each request (slot) and each option of it, (drafter, hint)."""

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[str, int], _Patience]] = {}

    def is_due(self, slot: int, key: tuple[str, int], now: int) -> bool:
        """True iff the option was left alone for long enough; `now` counts rounds."""
        patience = self._known.setdefault(slot, {}).setdefault(key, _Patience(now))
        return now - patience.last >= patience.wait

    def used(self, slot: int, key: tuple[str, int], now: int, was_probe: bool, stood: bool) -> None:
        """It drafted: as a probe whose first token stood or not, or because it pays."""
        patience = self._known.setdefault(slot, {}).setdefault(key, _Patience(now))
        patience.last = now
        if not was_probe:
            patience.wait = WAIT
        elif stood:
            patience.wait = max(SHORTEST, patience.wait // 2)
        else:
            patience.wait = min(LONGEST, max(WAIT, patience.wait * 2))

    def release(self, slot: int) -> None:
        """Forget the request in this slot."""
        self._known.pop(slot, None)
