"""How fast a recording is shown: answers at the speed at which they came, waits shortened, which the picture says.

A wait is while a bar or a spinner turns, or while nothing new comes for a second. It takes WAIT_S in the picture.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import or_
from typing import NamedTuple

WAIT_S = 1.5
SILENCE_S = 1.0
JOIN_S = 0.3  # waits that are nearer to each other are one
STEP_S, BUSY_STEP_S = 0.04, 0.12


class Lapse(NamedTuple):
    """Seconds of the picture in which time passes `times` faster."""

    since: float
    until: float
    times: float

    @property
    def label(self) -> str:
        """What the picture says meanwhile."""
        return f"waiting, {self.times:.0f} times as fast" if self.times >= 1.5 else "waiting"


def shortened(
    times: Sequence[float], busy: Sequence[bool], step_s: float = STEP_S
) -> tuple[dict[float, int], list[Lapse]]:
    """Which frame is seen from which second of the picture on, and where time passes faster.

    times: seconds of the frames. busy: whether each shows a wait. No two changes are nearer than step_s,
    nor BUSY_STEP_S in a wait.
    """
    silent = [after - now > SILENCE_S for now, after in pairwise(times)]
    is_wait = [*map(or_, busy, silent), False]
    for first, last in pairwise([at for at, waits in enumerate(is_wait) if waits]):
        if times[last] - times[first + 1] < JOIN_S:
            is_wait[first:last] = [True] * (last - first)
    seen, lapses, now = dict[float, int](), list[Lapse](), 0.0
    for waits, group in groupby(range(len(times)), is_wait.__getitem__):
        part = list(group)
        lasts = times[min(part[-1] + 1, len(times) - 1)] - times[part[0]]
        faster = max(1.0, lasts / WAIT_S) if waits else 1.0
        if faster > 1:
            lapses.append(Lapse(now, now + WAIT_S, faster))
        step = max(BUSY_STEP_S, step_s) if waits else step_s
        for at in part:
            seen[round(round((now + (times[at] - times[part[0]]) / faster) / step) * step, 3)] = at
        now += lasts / faster
    return dict(sorted(seen.items())), lapses
