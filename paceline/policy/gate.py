"""Speculation off while it does not pay, by the clock alone: for any policy, knowing nothing of drafters or costs."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from typing import Annotated, final

from pydantic import Field

from ..core.interfaces import DraftBudget, Drafter, DraftPolicy
from ..core.outputs import Round
from ..core.request import Sequence
from ..schema import checked_call

_PLAIN = 3  # plain rounds in a comparison


@final
class Gate(DraftPolicy):
    """Compare a few plain rounds with `trial` rounds of `inner`, by tokens per second; keep what is faster.

    trial: speculative rounds in a comparison. recheck: rounds after which an open gate compares again. A gate that
    closes stays so for `pause` rounds, twice as long each time, up to 32 pauses. Times are medians. The first
    speculative round of a comparison is left out: a draft model reads what it has missed, SPACE hangs its masks.
    """

    @checked_call
    def __init__(
        self,
        inner: DraftPolicy,
        trial: Annotated[int, Field(ge=1)] = 6,
        pause: Annotated[int, Field(ge=1)] = 16,
        recheck: Annotated[int, Field(ge=1)] = 64,
    ):
        self.inner, self.trial, self.pause, self.recheck = inner, trial, pause, recheck
        self._reset()

    def _reset(self) -> None:
        self._plain: list[float] = []  # seconds of each plain round
        self._drafted: list[tuple[float, float]] = []  # seconds and tokens per row of each speculative round
        self._is_first = True  # of the speculative rounds in this comparison
        self._quiet = 0  # rounds until the next comparison
        self._length = self.pause
        self._tokens = self._rows = 0  # of the round so far
        self._drafts = False
        self._reads = False  # some row's prompt was read in it: its seconds leave out the pass that verified
        self.is_open, self._speculates = True, False

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Bind the inner policy."""
        self._reset()
        self.inner.bind(drafter, pass_seconds)

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """The inner policy's, or nothing."""
        self._tokens, self._rows, self._reads, self._drafts = 0, 0, False, False
        self._speculates = self.is_open if self._quiet else len(self._plain) >= _PLAIN
        return self.inner.budgets(seqs) if self._speculates else [DraftBudget(0, 0)] * len(seqs)

    def observe(self, seq: Sequence, record: Round) -> None:
        """Time the round; the last row of a batch closes it."""
        if self._speculates:
            self.inner.observe(seq, record)
        self._tokens += record.num_emitted
        self._rows += 1
        self._reads = self._reads or record.with_prompt
        self._drafts = self._drafts or record.num_drafted > 0
        if self._rows < record.batch:
            return
        if self._quiet:
            self._quiet -= 1
        elif self._reads and not self._drafts:
            return  # one pass read a prompt and gave its first token: no round of either kind
        elif len(self._plain) < _PLAIN:
            self._plain.append(record.verify_s + record.rest_s)
            self._is_first = True
        elif self._is_first:
            self._is_first = False
        else:
            # Verifying took no more than a plain round: one pass read and verified, in the place of two.
            seconds = record.draft_s + median(self._plain) if self._reads else record.seconds
            self._drafted.append((seconds, self._tokens / record.batch))
            if len(self._drafted) >= self.trial:
                self._compare()

    def _compare(self) -> None:
        tokens = sum(tokens for _, tokens in self._drafted) / len(self._drafted)
        self.is_open = tokens * median(self._plain) >= median(seconds for seconds, _ in self._drafted)
        self._length = self.pause if self.is_open else min(self._length * 2, 32 * self.pause)
        self._quiet = self.recheck if self.is_open else self._length // 2
        self._plain, self._drafted = [], []

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        self.inner.release(slots)
