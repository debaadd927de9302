"""The record of a round, and figures made of records. Does not import torch, so that `paceline show` starts fast.

It is the only record of time: the seconds of a request and of an engine are sums over rounds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

MIN_TIMED = 8
"""Answers of fewer tokens are shown without a speed, since their time is too short to measure."""


class Origin(StrEnum):
    """Where an emitted token came from."""

    DRAFTED = "drafted"  # proposed by the drafter and accepted
    RECOVERED = "recovered"  # the target's correction of a rejected proposal
    BONUS = "bonus"  # the target's extra token after everything proposed was accepted
    PLAIN = "plain"  # nothing was proposed: an ordinary decoding step


@dataclass(frozen=True)
class Round:
    """One round of the loop for one sequence: what was drafted and accepted, and how long it took.

    token_ids, parents: the tree, root first, without probes and padding; `parents[0]` is -1.
    path: the accepted nodes, root excluded.
    confidences: the drafter's probability of each drafted node (root excluded); empty if it has none.
    hint: see `DraftOptions.hint`.
    num_probes: the rows that were only read, such as SPACE's masks and Lookahead's window.
    num_rows: the rows that the target's pass computed for this sequence, the root included; 0 if unknown.
    num_experts: the distinct experts that this pass read for the whole batch, added up over layers; 0 if unknown.
    with_prompt: whether the same pass computed the end of the prompt; its seconds then count as prefill.
    number: that of the round in its engine, from 1, the same for all sequences of the batch; 0 if unknown.
    queue_s, vision_s, prefill_s: of the first round in a slot, the seconds that this sequence alone took before it, and
        for the end of its text: waiting for the slot, encoding images, reading.
    draft_s, verify_s, rest_s, learn_s: the seconds of the round, which `batch` sequences shared. learn_s: for updates
        of the drafter and the policy, after the round before it.
    """

    source: str
    num_drafted: int  # length of the longest drafted path (0: a plain step)
    num_accepted: int
    num_emitted: int  # tokens appended: accepted + 1, fewer where the sequence ended inside the draft
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = (-1,)
    path: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    hint: int = 0
    batch: int = 1
    num_probes: int = 0
    num_rows: int = field(default=0, compare=False)
    num_experts: int = field(default=0, compare=False)
    with_prompt: bool = field(default=False, compare=False)
    number: int = field(default=0, compare=False)
    queue_s: float = field(default=0.0, compare=False)
    vision_s: float = field(default=0.0, compare=False)
    prefill_s: float = field(default=0.0, compare=False)
    draft_s: float = field(default=0.0, compare=False)
    verify_s: float = field(default=0.0, compare=False)
    rest_s: float = field(default=0.0, compare=False)
    learn_s: float = field(default=0.0, compare=False)

    @property
    def num_nodes(self) -> int:
        """The number of drafted nodes that were verified."""
        return len(self.parents) - 1

    @property
    def seconds(self) -> float:
        """The duration of the whole round, without prompts."""
        return self.draft_s + self.verify_s + self.rest_s + self.learn_s


@dataclass(frozen=True)
class Timings:
    """Seconds spent in the parts of the loop, summed over rounds; for a request, over the rounds it took part in.

    queue: waiting for a slot, also again. vision: encoding images before the prefill.
    """

    queue: float = 0.0
    vision: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0
    rounds: int = 0

    @staticmethod
    def of(rounds: Iterable[Round]) -> "Timings":
        """The sum over the rounds of answers of one engine; what they shared counts once."""
        each = list(rounds)
        shared = {record.number or id(record): record for record in each}.values()
        return Timings(
            queue=sum((record.queue_s for record in each), 0.0),
            vision=sum((record.vision_s for record in each), 0.0),
            prefill=sum((record.prefill_s for record in each), 0.0),
            draft=sum((record.draft_s for record in shared), 0.0),
            verify=sum((record.verify_s for record in shared), 0.0),
            rest=sum((record.rest_s + record.learn_s for record in shared), 0.0),
            rounds=len(shared),
        )

    @property
    def decode(self) -> float:
        """The seconds after the prefill."""
        return self.draft + self.verify + self.rest


def tokens_per_pass(rounds: Iterable[Round]) -> float:
    """Tokens per target pass after prefill, the target's own token included (vLLM: mean acceptance length).

    rounds: those of one answer or of several. Without any the result is 0.
    """
    emitted = [record.num_emitted for record in rounds if not record.with_prompt]
    return sum(emitted) / len(emitted) if emitted else 0.0


def experts_per_pass(rounds: Iterable[Round]) -> float:
    """The distinct experts that a target pass read, added up over layers, in the mean; 0 where it has none."""
    read = {record.number or id(record): record.num_experts for record in rounds if record.num_experts}
    return sum(read.values()) / len(read) if read else 0.0
