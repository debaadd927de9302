"""The record that every round leaves, and figures of it. No torch here: `paceline show` does not wait for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

MIN_TIMED = 8
"""Answers of fewer tokens are shown without a speed: so short a time says nothing."""


@dataclass(frozen=True)
class Round:
    """One turn of the loop for one sequence: what was drafted and accepted, and the seconds it took.

    token_ids, parents: the tree, root first, probes and padding left out; `parents[0]` is -1.
    path: the accepted nodes, root excluded.
    confidences: the drafter's own probability of each drafted node (root excluded), empty where it gives none.
    hint: the drafter's own class of the situation, see `DraftOptions.hint`.
    num_rows: the rows that the target's pass computed for this sequence, the root included; 0 if unknown.
    with_prompt: the target verified it in the pass that read the end of the prompt, whose seconds count as prefill.
    draft_s, verify_s, rest_s: the seconds of the whole batch's turn, of which this sequence was one of `batch`.
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
    num_rows: int = field(default=0, compare=False)
    with_prompt: bool = field(default=False, compare=False)
    draft_s: float = field(default=0.0, compare=False)
    verify_s: float = field(default=0.0, compare=False)
    rest_s: float = field(default=0.0, compare=False)

    @property
    def num_nodes(self) -> int:
        """Candidates verified."""
        return len(self.parents) - 1

    @property
    def seconds(self) -> float:
        """The whole turn."""
        return self.draft_s + self.verify_s + self.rest_s


def tokens_per_pass(rounds: Iterable[Round]) -> float:
    """Tokens per pass of the target after prefill, its own token included: vLLM's mean acceptance length.

    rounds: of one answer, or of several together. 0 without passes.
    """
    emitted = [one.num_emitted for one in rounds if not one.with_prompt]
    return sum(emitted) / len(emitted) if emitted else 0.0
