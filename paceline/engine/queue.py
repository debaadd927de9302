"""Who comes next: the order of the answers that wait for a slot, and which ones give their slots to them.

Slots go to the answers of the best priority, among these to the account that has the fewest, and then in the order in
which they began to wait, where one that had a slot before counts as later by the time that it had it, up to ten
seconds. A new answer that has waited for half a second takes the slot of another of its priority that has had it for a
second and has 64 tokens or more; one that had a slot before waits until that is also ten times what reading the other's
text took. One of a better priority takes the slot of one of a worse at once. Where there is no memory for the next one,
others that need less go before it, for ten seconds.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import final

from .request import Answer

PATIENCE_S, QUANTUM_S, QUANTUM_TOKENS = 0.5, 1.0, 64
_READINGS = 10  # so that reading texts again takes a tenth of the time at most, besides once for each new answer
_MOST_CREDIT_S = 10.0  # by which an answer counts as arriving later
PASSED_S = 10.0  # for which others may go before an answer that lacks memory


@final
class Queue:
    """Answers that wait for a slot."""

    def __init__(self) -> None:
        self._heaps = dict[tuple[str, bool, bool], list[tuple[int, float, int, Answer]]]()
        self._count = count()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def add(self, answer: Answer) -> None:
        """Let an answer wait from now on."""
        answer.since = time.perf_counter()
        rank = answer.since + min(answer.served_s, _MOST_CREDIT_S)
        heap = self._heaps.setdefault(_kind(answer), [])
        heappush(heap, (answer.seq.params.priority, rank, next(self._count), answer))

    def remove(self, answer: Answer) -> None:
        """Let an answer wait no more; harmless if it does not."""
        heap = self._heaps.get(_kind(answer), [])
        if heap and heap[0][3] is answer:
            heappop(heap)
        elif any(entry[3] is answer for entry in heap):
            heap[:] = [entry for entry in heap if entry[3] is not answer]
            heapify(heap)
        if not heap:
            self._heaps.pop(_kind(answer), None)

    def heads(self, held: Mapping[str, int], with_further: bool = True) -> list[Answer]:
        """Who is next, and behind it the first ones of other accounts and kinds.

        held: slots by account. with_further: also answers after the first of a request.
        """
        heads = [
            (heap[0][0], held.get(account, 0), *heap[0][1:])
            for (account, is_further, _), heap in self._heaps.items()
            if with_further or not is_further
        ]
        return [head[-1] for head in sorted(heads)]


def _kind(answer: Answer) -> tuple[str, bool, bool]:
    """Its account, whether it is a further answer of its request, and whether it had a slot before."""
    return answer.seq.params.account, answer.index > 0, answer.served_s > 0


def accounts(answers: Collection[Answer]) -> Counter[str]:
    """How many of these answers each account has."""
    return Counter(answer.seq.params.account for answer in answers)


def yielding(
    waiting: Answer, running: Collection[Answer], is_enough: Callable[[Sequence[Answer]], bool]
) -> Sequence[Answer]:
    """The answers that give their slots to one that waits; none if those that may are not enough.

    First those of the worst priority, then of the account with the most slots, then those that had slots the longest.
    """
    now, priority, held = time.perf_counter(), waiting.seq.params.priority, accounts(running)
    is_patient = now - waiting.since < PATIENCE_S

    def may_yield(one: Answer) -> bool:
        if one.seq.params.priority != priority:
            return one.seq.params.priority > priority
        quantum = max(QUANTUM_S, _READINGS * one.read_s) if waiting.served_s else QUANTUM_S
        return not is_patient and now - one.since >= quantum and one.seq.num_output >= QUANTUM_TOKENS

    able = sorted(
        filter(may_yield, running),
        key=lambda one: (-one.seq.params.priority, -held[one.seq.params.account], one.since - one.served_s),
    )
    return next((able[:size] for size in range(1, len(able) + 1) if is_enough(able[:size])), ())


def may_pass(waiting: Answer) -> bool:
    """Whether others may go before an answer for which there is no memory."""
    return time.perf_counter() - waiting.since < PASSED_S


def growing(answers: Collection[Answer], has_all: Callable[[Answer], bool]) -> Answer:
    """The answer that gives its slot where another lacks memory: of the worst priority, the last that got one.

    has_all: whether an answer has all the memory that it may need; such a short one is soon over.
    """
    return max(answers, key=lambda one: (one.seq.params.priority, not has_all(one), one.since))
