"""When a drafter that was not chosen is tried: ever more seldom while it fails."""

from dataclasses import dataclass
from typing import final

from .constants import LONGEST, WAIT


@dataclass(slots=True)
class _BackOff:
    last: int  # round of the last use
    wait: int = 0  # not tried yet


@final
class Trials:
    """Exponential back-off for each owner, (a request's slot or -1 for all), and each of its options."""

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[str, int], _BackOff]] = {}
        self._last: dict[str, int] = {}  # the round in which each drafter was last used

    def is_due(self, owner: int, key: tuple[str, int], now: int) -> bool:
        """Whether the option was left alone for long enough; `now` counts rounds."""
        back_off = self._known.setdefault(owner, {}).setdefault(key, _BackOff(now))
        return now - back_off.last >= back_off.wait

    def postpone(self, owner: int, key: tuple[str, int], now: int) -> None:
        """It could not pay now, which is soon asked again."""
        back_off = self._known[owner][key]
        back_off.last = now + WAIT - back_off.wait

    def unused(self, source: str, now: int) -> float:
        """For how long a drafter was not used, as a share of LONGEST; since the start for what a profile knows."""
        return (now - self._last.get(source, 0)) / LONGEST

    def used(self, owner: int, key: tuple[str, int], now: int, was_trial: bool, accepted: bool) -> None:
        """Note that it drafted, either as a trial whose first token was accepted or not, or because it pays."""
        back_off = self._known.setdefault(owner, {}).setdefault(key, _BackOff(now))
        back_off.last = self._last[key[0]] = now
        if not was_trial:
            back_off.wait = WAIT
        elif accepted:
            back_off.wait = max(WAIT // 2, back_off.wait // 2)
        else:
            back_off.wait = min(LONGEST, max(WAIT, back_off.wait * 2))

    def release(self, slot: int) -> None:
        self._known.pop(slot, None)
