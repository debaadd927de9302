"""The record of a round, and figures made of records. Does not import torch, so that `paceline show` starts fast."""

from collections.abc import Iterable
from dataclasses import dataclass, field

MIN_TIMED = 8
"""Answers of fewer tokens are shown without a speed, since their time is too short to measure."""


@dataclass(frozen=True)
class Round:
    """One round of the loop for one sequence: what was drafted and accepted, and how long it took.

    token_ids, parents: the tree, root first, without probes and padding; `parents[0]` is -1.
    path: the accepted nodes, root excluded.
    confidences: the drafter's probability of each drafted node (root excluded); empty if it has none.
    hint: see `DraftOptions.hint`.
    num_probes: the rows that were only read, such as SPACE's masks and Lookahead's window.
    num_rows: the rows that the target's pass computed for this sequence, the root included; 0 if unknown.
    with_prompt: whether the same pass computed the end of the prompt; its seconds then count as prefill.
    draft_s, verify_s, rest_s: the seconds of the round, which `batch` sequences shared.
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
    with_prompt: bool = field(default=False, compare=False)
    draft_s: float = field(default=0.0, compare=False)
    verify_s: float = field(default=0.0, compare=False)
    rest_s: float = field(default=0.0, compare=False)

    @property
    def num_nodes(self) -> int:
        """The number of drafted nodes that were verified."""
        return len(self.parents) - 1

    @property
    def seconds(self) -> float:
        """The duration of the whole round."""
        return self.draft_s + self.verify_s + self.rest_s


def tokens_per_pass(rounds: Iterable[Round]) -> float:
    """Tokens per target pass after prefill, the target's own token included (vLLM: mean acceptance length).

    rounds: those of one answer or of several. Without any the result is 0.
    """
    emitted = [one.num_emitted for one in rounds if not one.with_prompt]
    return sum(emitted) / len(emitted) if emitted else 0.0
