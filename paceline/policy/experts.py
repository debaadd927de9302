"""What a pass reads of a mixture of experts, and what an expert takes.

A pass reads each expert that one of its rows has chosen, once. So a node costs the experts that it adds, and the text
decides how many those are: neighbours share some, copied passages many. If rows chose independently, n of them would
read I(n) = E (1 - (1 - k / E)^n) of E experts, where one reads k. Of what nodes would add by that, the share that they
really add is their novelty. It is learnt for each drafter.

A pass over n rows that reads x experts takes T(n) + c (x - x(n)), where x(n) were read when T(n) was measured.
"""

from collections.abc import Mapping
from typing import final

from ..core.interfaces import TargetExperts
from .odds import FADE
from .profile import Profile

ROOTS = ""  # the source of the roots of a batch after the first


@final
class Experts:
    """The experts that passes are expected to read, and the seconds that one takes.

    read: x(n), counts of distinct experts added up over layers, as everywhere. seconds: c.
    counts: by drafter, the experts that its nodes have added, and independent ones, fading.
    """

    def __init__(self, target: TargetExperts, given: Profile):
        fits = 1 in given.pass_experts and max(given.pass_experts.values()) <= target.count
        if not fits or given.pass_experts.keys() != given.pass_seconds.keys():
            given = Profile()  # of another target, or of one whose experts were not counted
        self.target, self.read, self.counts = target, dict(given.pass_experts), dict(given.novelty)
        self.seconds = self._begun = given.expert_seconds
        self._products = self._squares = 0.0
        self._last = dict[int, tuple[int, float]]()  # by rows

    @property
    def of_row(self) -> int:
        """How many one row reads, k."""
        return self.read[1]

    def begin(self, seconds: Mapping[int, float]) -> None:
        """Measure c: T(n), of the most rows, beside a pass over as many rows that share most of their experts.

        It is at most what rows add to a pass, and just that where they share no more experts than others.
        """
        last = max(seconds)
        took, added = seconds[last] - self.target.alike_seconds(last), self.read[last] - self.target.read()
        most = max(0.0, seconds[last] - seconds[1]) / max(1, self.read[last] - self.of_row)
        self.seconds = self._begun = min(max(0.0, took / added), most) if added > 0 else most

    def independent(self, rows: float) -> float:
        """I(rows)."""
        return self.target.count * (1 - (1 - self.of_row / self.target.count) ** rows)

    def novelty(self, source: str) -> float:
        """That of a drafter's nodes. Before it has drafted they count as independent, by as much as one row."""
        added, independent = self.counts.get(source, (0.0, 0.0))
        return (added + self.of_row) / (independent + self.of_row)

    def expected(self, batch: int, nodes: float = 0.0, novelty: float = 0.0) -> float:
        """What a pass over `batch` trees with so many nodes each, of this novelty, reads."""
        roots = self.independent(batch)
        added = self.independent(batch * (1 + nodes)) - roots
        return self.of_row + self.novelty(ROOTS) * (roots - self.of_row) + novelty * added

    def learn_read(self, read: int, batch: int, nodes: Mapping[str, int]) -> None:
        """A pass over `batch` trees read so many. nodes: by drafter; empty where nothing was drafted."""
        known, rows = (self.expected(batch), batch) if nodes else (self.of_row, 1)
        nodes = nodes or {ROOTS: batch - 1}
        if total := sum(nodes.values()):
            added, independent = max(0.0, read - known), self.independent(rows + total) - self.independent(rows)
            shares = {source: self.novelty(source) * count for source, count in nodes.items()}
            for source, share in shares.items():
                before, alone = self.counts.get(source, (0.0, 0.0))
                own = added * share / sum(shares.values()), independent * nodes[source] / total
                self.counts[source] = before * FADE + own[0], alone * FADE + own[1]

    def learn_seconds(self, rows: int, read: int, seconds: float) -> None:
        """A pass took these seconds, by the clock that T(n) was measured with.

        What the last pass over as many rows took differs by the experts. These differences count beside the first
        estimate by their squares, as in a regression.
        """
        before, self._last[rows] = self._last.get(rows), (read, seconds)
        if before is not None:
            more = read - before[0]
            self._products = self._products * FADE + more * (seconds - before[1])
            self._squares = self._squares * FADE + more * more
            weight = (max(self.read.values()) - self.of_row) ** 2 or 1
            self.seconds = max(0.0, (weight * self._begun + self._products) / (weight + self._squares))
