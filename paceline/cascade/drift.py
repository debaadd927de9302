"""Does a promise "at most a share m of all answers differs" still hold? A test that may be looked at after every audit.

Each audited request either differs (y = 1) or not. A bet against the promise, started at request s, multiplies its
stake by (q/m)^y ((1-q)/(1-m))^(1-y) with some q > m. If the chance of y = 1 is at most m, whatever came before, then
the stake cannot be expected to grow; the same holds for a fixed mixture of bets, over rates q and over all starting
times s (a change may come late). By Ville's inequality the wealth of the mixture ever reaches 1 / false_alarm with a
probability of at most `false_alarm`, however long one goes on (Ville 1939; Waudby-Smith and Ramdas 2010.09686).

    wealth_t = mean over q of A_q + 1 / (t + 1)      A_q <- (A_q + w_t) * factor(y_t)      w_t = 1 / (t (t + 1))
               bets that have started   the rest
"""

from typing import final

from ..errors import ConfigError

_TIMES = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
"""Rates that are bet on, in multiples of the promised one."""


@final
class DriftAlarm:
    """Raised once the promise is refuted; stays raised until `reset`.

    limit: the promised share m. false_alarm: the chance that it is ever raised while the promise holds.
    """

    def __init__(self, limit: float, false_alarm: float = 0.01):
        for name, value in (("limit", limit), ("false_alarm", false_alarm)):
            if not 0.0 < value < 1.0:
                raise ConfigError(f"{name} is out of range", got=value, expected="a number between 0 and 1")
        self.limit, self.false_alarm = limit, false_alarm
        rates = [limit * times for times in _TIMES if limit * times < 1.0] or [(1.0 + limit) / 2]
        self._factors = [((1.0 - q) / (1.0 - limit), q / limit) for q in rates]
        self.reset()

    def reset(self) -> None:
        """Start anew, as after a new calibration."""
        self.seen = self.differed = 0
        self.raised = False
        self._bets = [0.0] * len(self._factors)

    @property
    def wealth(self) -> float:
        """What the bets have made of 1: evidence against the promise, which `1 / false_alarm` makes an alarm."""
        return sum(self._bets) / len(self._bets) + 1.0 / (self.seen + 1)

    def see(self, differs: bool) -> bool:
        """Take one audited request; returns whether the alarm is raised."""
        self.seen += 1
        self.differed += differs
        start = 1.0 / (self.seen * (self.seen + 1))
        self._bets = [(held + start) * by[differs] for held, by in zip(self._bets, self._factors, strict=True)]
        self.raised = self.raised or self.wealth >= 1.0 / self.false_alarm
        return self.raised
