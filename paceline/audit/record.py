"""What an audit found, stage by stage; complete or not, it can be judged and reported."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from .run import Run
from .verdicts import TOLERANCE, Judgement, Verdict

FailOn: TypeAlias = Literal["different", "unstable", "near-tie"]


class Case(NamedTuple):
    """One prompt in one comparison. counts: how many of the answers had each verdict; worst: the worst of them.

    drift: the most by which log-probabilities differ before the answers part.
    """

    prompt: int
    counts: Mapping[Verdict, int]
    worst: Judgement
    drift: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One kind of answers against another. is_own: both of one side in one setting, which should repeat itself."""

    name: str
    first: str
    second: str
    is_own: bool
    cases: tuple[Case, ...]

    @property
    def counts(self) -> dict[Verdict, int]:
        """Answers by verdict."""
        sums = Counter[Verdict]()
        for case in self.cases:
            sums.update(case.counts)
        return {verdict: sums[verdict] for verdict in Verdict}

    @property
    def num_answers(self) -> int:
        """All that were compared."""
        return sum(self.counts.values())

    @property
    def drift(self) -> float | None:
        """The most of all cases."""
        return max((case.drift for case in self.cases if case.drift is not None), default=None)


class Fault(NamedTuple):
    """Something wrong besides differing answers. is_unstable: it only means that answers cannot be repeated."""

    subject: str
    text: str
    is_unstable: bool = False


def counts_as_failure(verdict: Verdict, is_own: bool, fail_on: FailOn) -> bool:
    """Whether an answer with this verdict fails the audit. is_own: see `Comparison`."""
    if verdict is Verdict.NEAR_TIE:
        return fail_on == "near-tie" or (fail_on == "unstable" and is_own)
    return verdict is not Verdict.IDENTICAL


def fault_counts(fault: Fault, fail_on: FailOn) -> bool:
    """Whether a fault fails the audit."""
    return fail_on != "different" or not fault.is_unstable


class SampledTest(NamedTuple):
    """A test of distributions. least_shift: of probability, that it notices nine times of ten."""

    name: str
    samples: int
    tokens: int
    p_value: float
    false_alarm: float
    least_shift: float

    @property
    def passed(self) -> bool:
        """Whether equal distributions explain the samples."""
        return self.p_value > self.false_alarm


class Speed(NamedTuple):
    """Tokens a second and seconds to the first token, with the bounds of 95% intervals; None with too few prompts.

    ratio: tokens a second over those of the first side, measured in turns.
    """

    name: str
    tokens_per_s: tuple[float, float | None, float | None]
    first_s: tuple[float, float | None, float | None] | None
    ratio: tuple[float, float | None, float | None] | None


class Drafts(NamedTuple):
    """What a server says of its drafts. length: tokens of a pass that verified one, with the bounds of its interval.

    is_exact: whether no other passes are counted; otherwise `length` is at least so much.
    """

    name: str
    drafted: int | None
    accepted: int
    passes: int
    length: tuple[float, float | None, float | None]
    card: float | None = None
    is_exact: bool = True

    @property
    def is_below_card(self) -> bool:
        """Whether even the upper bound is below the card."""
        value, _, high = self.length
        return self.card is not None and (value if high is None else high) < self.card


@dataclass
class Record:
    """All findings. prompts: in words; sides: what is known of each; remarks: what could not be tested, and why."""

    prompts: Sequence[str] = ()
    sides: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float = TOLERANCE
    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict[tuple[str, str], list[Run]])
    comparisons: list[Comparison] = field(default_factory=list[Comparison])
    faults: list[Fault] = field(default_factory=list[Fault])
    tests: list[SampledTest] = field(default_factory=list[SampledTest])
    speeds: list[Speed] = field(default_factory=list[Speed])
    drafts: list[Drafts] = field(default_factory=list[Drafts])
    remarks: list[str] = field(default_factory=list[str])
    stopped: str | None = "it did not begin"

    @property
    def is_complete(self) -> bool:
        """Whether all was asked that was planned."""
        return self.stopped is None

    def failures(self, fail_on: FailOn = "different") -> list[str]:
        """Why the audit fails, in words; empty where it passes."""
        found = list[str]()
        for one in self.comparisons:
            counts, total = one.counts, one.num_answers
            bad = [verdict for verdict in Verdict if counts_as_failure(verdict, one.is_own, fail_on)]
            told = [f"{counts[verdict]} {verdict.value}" for verdict in bad if counts[verdict]]
            if told:
                found.append(f"{one.name}: {', '.join(told)} of {total} answers")
        found += [f"{f.subject}: {f.text}" for f in self.faults if fault_counts(f, fail_on)]
        found += [f"{test.name}: p = {test.p_value:.2g}" for test in self.tests if not test.passed]
        found += [
            f"{one.name}: {one.length[0]:.2f} tokens a pass, below the {one.card:.2f} of the card"
            for one in self.drafts
            if one.is_below_card
        ]
        return found
