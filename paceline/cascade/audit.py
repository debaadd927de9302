"""Audits test whether the guarantee still holds: the large model checks a share of the requests.

The audited requests are drawn before the models answer, so the draw depends on neither prompt nor answer. An audited
request that the large model answered counts as agreement, because the guarantee is about all requests.
"""

from dataclasses import dataclass
from typing import final

from ..schema import checked_call
from .bound import Share

_RATES = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
"""Rates of disagreement that the test bets on, in multiples of the limit."""


@final
class DriftAlarm:
    """A sequential test (by betting) of "at most a share `limit` of the answers differ", valid at every time.

    Each audited request either differs (y = 1) or not. A bet against the hypothesis multiplies its stake by
    (q/m)^y ((1-q)/(1-m))^(1-y), where m is the limit and q > m the rate that is bet on. Under the hypothesis no bet has
    an expected gain, and neither has a fixed mixture of bets over several q and over all starting times s (a change
    may come late). By Ville's inequality the wealth of the mixture then ever reaches 1 / false_alarm with a
    probability of at most `false_alarm` (Ville 1939; Waudby-Smith and Ramdas 2010.09686).

        wealth_t = mean over q of A_q + 1 / (t + 1)      A_q <- (A_q + w_t) * factor(y_t)      w_t = 1 / (t (t + 1))
                   bets that have started   the rest

    Once raised it stays raised until `reset`.
    """

    @checked_call
    def __init__(self, limit: Share, false_alarm: Share = 0.01):
        self.limit, self.false_alarm = limit, false_alarm
        rates = [limit * times for times in _RATES if limit * times < 1.0] or [(1.0 + limit) / 2]
        self._factors = [((1.0 - q) / (1.0 - limit), q / limit) for q in rates]
        self.reset()

    def reset(self) -> None:
        """Restart the test, as after a new calibration."""
        self.seen = self.differed = 0
        self.raised = False
        self._bets = [0.0] * len(self._factors)

    @property
    def wealth(self) -> float:
        """The evidence against the hypothesis; it starts at 1, and at `1 / false_alarm` the alarm is raised."""
        return sum(self._bets) / len(self._bets) + 1.0 / (self.seen + 1)

    def see(self, differs: bool) -> bool:
        """Count one audited request; returns whether the alarm is raised."""
        self.seen += 1
        self.differed += differs
        start = 1.0 / (self.seen * (self.seen + 1))
        self._bets = [(bet + start) * factor[differs] for bet, factor in zip(self._bets, self._factors, strict=True)]
        self.raised = self.raised or self.wealth >= 1.0 / self.false_alarm
        return self.raised


@dataclass(frozen=True)
class AuditCounts:
    """Audited requests; those of them that the small model answered and the large one checked; those that differ."""

    seen: int = 0
    checked: int = 0
    differed: int = 0
