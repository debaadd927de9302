"""What rounds cost without the clock's noise: medians of measured rounds, and a policy that sees them as its clock.

On a shared machine one round in twenty takes ten times as long, and that decides which of two windows looks better. So
rounds are counted twice: in the seconds they took, and in what rounds of their size took in the median, measured in the
same run. A policy that decides by the clock can be shown either.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, final

import numpy as np

from paceline import CostModel, PromptLookup
from paceline.core.interfaces import DraftBudget, Drafter, DraftPolicy
from paceline.core.outputs import Round
from paceline.core.request import Sequence
from paceline.policy import Profile
from paceline.policy.costs import PassCurve

RIDING = 8
"""Pending tokens that ride along with a draft's first pass."""


@dataclass(frozen=True)
class Spent:
    """One round: what it did, and what the drafter had to read first. seconds: draft, verify, rest.

    joined: the target verified it in the pass that read the end of the prompt, whose seconds are not among these.
    """

    source: str
    drafted: int
    accepted: int
    emitted: int
    rows: int
    uncached_tokens: int
    joined: bool
    seconds: tuple[float, float, float]

    @classmethod
    def of(cls, record: Round, uncached_tokens: int) -> "Spent":
        """From the record of a round."""
        seconds = (record.draft_s, record.verify_s, record.rest_s)
        source = record.source if record.num_drafted else ""
        return cls(
            source, record.num_drafted, record.num_accepted, record.num_emitted, record.num_rows, uncached_tokens,
            record.with_prompt, seconds,
        )  # fmt: skip


@dataclass(frozen=True)
class Prices:
    """Medians in seconds. turn: pass and rest of a round by rows. draft: by source, of a round, a token, a read token.

    rest: of a round. vision: of a picture in the tower. read: of a prompt token, the root among them; candidates that
    share a pass with the end of the prompt are taken for such tokens.
    """

    turn: dict[int, float]
    draft: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    rest: float = 0.0
    vision: float = 0.0
    read: float = 0.0

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Prices":
        """From what JSON made of one."""
        turn = {int(rows): seconds for rows, seconds in given["turn"].items()}
        draft = {source: tuple(three) for source, three in given["draft"].items()}
        return cls(turn, draft, given["rest"], given["vision"], given["read"])

    as_dict = asdict

    def parts(self, one: Spent) -> tuple[float, float]:
        """Drafting, and the target's turn."""
        base, token, reading = self.draft.get(one.source, (0.0, 0.0, 0.0))
        read = reading * one.uncached_tokens if one.uncached_tokens > RIDING else 0.0
        turn = self.rest + (one.rows - 1) * self.read if one.joined else self.turn_s(one.rows)
        return (base + token * one.drafted + read if one.drafted else 0.0), turn

    def turn_s(self, rows: int) -> float:
        """Pass and rest of a round over so many rows, straight between the measured numbers of rows."""
        return self._curve.seconds(rows)

    @cached_property
    def _curve(self) -> PassCurve:
        return PassCurve(self.turn)

    def decode(self, rounds: Iterable[Spent]) -> float:
        """Of a whole answer."""
        return sum(sum(self.parts(one)) for one in rounds)

    def profile(self) -> Profile:
        """As a policy knows costs beforehand; nothing of acceptance."""
        seconds = {name: (max(token + base, 1e-9), max(read, 1e-9)) for name, (base, token, read) in self.draft.items()}
        return Profile(pass_seconds={n: self.turn_s(n) for n in sorted(self.turn)}, draft_seconds=seconds)


def prices_of(rounds: Seq[Spent], vision: Seq[float], read: Seq[float]) -> Prices:
    """Medians by rows; of drafts a straight line through the medians by their lengths.

    vision, read: seconds of a picture and of a prompt token, one for each prompt.
    """
    turns, drafts = defaultdict[int, list[float]](list), defaultdict[str, dict[int, list[float]]](dict)
    for one in rounds:
        if not one.joined:
            turns[one.rows].append(one.seconds[1] + one.seconds[2])
        if one.drafted and one.uncached_tokens <= RIDING:
            drafts[one.source].setdefault(one.drafted, []).append(one.seconds[0])
    draft = {source: (*_line(by_length), 0.0) for source, by_length in drafts.items()}
    late = defaultdict[str, list[float]](list)
    for one in rounds:
        if one.drafted and one.uncached_tokens > RIDING:
            base, token, _ = draft.get(one.source, (0.0, 0.0, 0.0))
            late[one.source].append(max(0.0, one.seconds[0] - base - token * one.drafted) / one.uncached_tokens)
    for source, seconds in late.items():
        draft[source] = (*draft.get(source, (0.0, 0.0, 0.0))[:2], statistics.median(seconds))
    turn = {rows: statistics.median(seconds) for rows, seconds in sorted(turns.items())}
    rest = statistics.median(one.seconds[2] for one in rounds)
    return Prices(turn, draft, rest, statistics.median(vision), statistics.median(read))


def _line(by_length: dict[int, list[float]]) -> tuple[float, float]:
    """(of a round, of a token), neither negative."""
    lengths = sorted(by_length)
    middles = [statistics.median(by_length[n]) for n in lengths]
    if len(lengths) > 1:
        weights = [len(by_length[n]) ** 0.5 for n in lengths]
        token, base = np.polyfit(lengths, middles, 1, w=weights).tolist()
        if base >= 0 and token >= 0:
            return base, token
    return 0.0, statistics.median(middle / n for n, middle in zip(lengths, middles, strict=True))


@final
class Watched(DraftPolicy):
    """A policy whose rounds are kept as `Spent`; with prices it sees those in the place of the clock's seconds.

    For one sequence at a time.
    """

    def __init__(self, inner: DraftPolicy, prices: Prices | None = None):
        self.inner, self.prices, self.spent = inner, prices, list[Spent]()

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Meet the drafter. With prices a cost model must have been given their profile: it then measures nothing."""
        self._drafter, self._reads = drafter, not isinstance(drafter, PromptLookup)  # whose outlook searches the text
        self.inner.bind(drafter, pass_seconds if self.prices is None else self.prices.turn_s)

    def measure(self, room: int) -> None:
        """As LLM does with a cost model before its first prompt."""
        if isinstance(self.inner, CostModel) and self.prices is None:
            self.inner.measure(room)

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """Those of the policy within; notes what the drafter would have to read."""
        (seq,) = seqs
        wishes = self.inner.budgets(seqs)
        looks = self._drafter.draft_options(seq) if self._reads and wishes[0].depth else ()
        self._pending = looks[wishes[0].drafter_index].uncached_tokens if looks else 0
        return wishes

    def observe(self, seq: Sequence, record: Round) -> None:
        """Keep the round, then let the policy learn from it."""
        self.spent.append(one := Spent.of(record, self._pending))
        if self.prices is not None:
            drafting, turn = self.prices.parts(one)
            record = replace(record, draft_s=drafting, verify_s=turn, rest_s=0.0)
        self.inner.observe(seq, record)

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        self.inner.release(slots)

    def take(self) -> list[Spent]:
        """The rounds since it was last asked."""
        taken, self.spent = self.spent, []
        return taken
