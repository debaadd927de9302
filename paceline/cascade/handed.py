"""An answer that somebody else wrote is the first draft; where the target leaves it, an ordinary drafter goes on.

handed      yes , it is .          the small model's answer, as one chain below the prompt's last token
target      yes . <eos>            keeps "yes", says "." itself, and goes on from there: what it would have said
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DraftOptions, DraftPolicy, Target, Verifier
from ..core.outputs import Round, TargetOutput, VerifyOutput
from ..core.request import Sequence
from ..core.tree import TokenTree
from ..decoding import SpeculativeDecoder
from ..llm import LLM
from ..policy import CostModel

ARM = -1
"""The arm of a budget for an answer that was handed over; other arms are those of the drafter that goes on."""


@final
class Handed(Drafter):
    """Draft the answer that was handed over for a sequence, as long as its text agrees with it; then let `then` draft.

    Answers are given for the sequences to come, in the order in which they are admitted. A wrong one costs acceptance,
    nothing else. A round in which some row has an answer drafts nothing for the others, so that all rows have one law.
    """

    name: ClassVar[str] = "handed"

    def __init__(self, then: Drafter):
        self.then = then
        self._next: deque[tuple[int, ...]] = deque()
        self._answers: dict[int, tuple[int, ...]] = {}  # by slot

    def give(self, answers: Seq[Seq[int]]) -> None:
        """Hand over one answer for each sequence to come, empty where there is none; what was left is forgotten."""
        self._next = deque(tuple(answer) for answer in answers)
        self._answers.clear()

    def rest(self, seq: Sequence) -> tuple[int, ...]:
        """What is left of the answer handed over, where the text agrees with it so far; else nothing."""
        said = tuple(seq.output_ids)
        if seq.slot not in self._answers:
            self._answers[seq.slot] = self._draftable(self._next.popleft()) if self._next and not said else ()
        answer = self._answers[seq.slot]
        return answer[len(said) :] if answer[: len(said)] == said else ()

    def _draftable(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """The answer before the first token that the target does not have, or that stands for a picture."""
        most, banned = self._vocab_size, self._banned_token_ids
        end = next((i for i, token in enumerate(answer) if token >= most or token in banned), len(answer))
        return answer[:end]

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Bind the drafter that goes on."""
        self._vocab_size, self._banned_token_ids = target.vocab_size, target.banned_token_ids
        self.then.bind(target, verifier)

    def drafts_during_prefill(self, drafter_index: int | None = None) -> bool:
        """An answer is there before the target has read anything."""
        return drafter_index in (None, ARM) or self.then.drafts_during_prefill(drafter_index)

    @property
    def branches(self) -> int:
        """Those of the drafter that goes on."""
        return self.then.branches

    @property
    def masks(self) -> int:
        """Those of the drafter that goes on."""
        return self.then.masks

    @property
    def reads_states(self) -> bool:
        """Whether the drafter that goes on does."""
        return self.then.reads_states

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """That of the drafter that goes on: a policy need not weigh what is already written."""
        return self.then.draft_options(seq)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Those of the drafter that goes on."""
        return self.then.seconds()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """The rest of each answer within its budget; where no row has one, what `then` drafts."""
        rests = [self.rest(seq) for seq in seqs]
        if not any(rests):
            return self.then.propose(seqs, budgets)
        rows = [
            [seq.token_ids[-1], *rest[: min(budget.depth, budget.nodes)]]
            for seq, rest, budget in zip(seqs, rests, budgets, strict=True)
        ]
        return Draft(TokenTree.chain(rows), source=self.name)

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOutput, verdict: VerifyOutput) -> None:
        """`then` sees every round, so that it is in step when its turn comes."""
        self.then.observe(seqs, draft, out, verdict)

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._answers.pop(slot, None)
        self.then.release(slots)


def with_handed(llm: LLM, then: Drafter, policy: DraftPolicy) -> tuple[LLM, Handed]:
    """The same model and cache with answers handed over, and what takes them. `bind` raises as drafters do."""
    other, handed = copy.copy(llm), Handed(then)
    other.decoder = SpeculativeDecoder(llm.runner, handed, llm.verifier, HandedFirst(handed, policy))
    if isinstance(policy, CostModel):
        policy.measure(llm.runner.max_length)
    return other, handed


@final
class HandedFirst(DraftPolicy):
    """The whole rest of an answer that was handed over, at once: it costs nothing to draft. Then another policy."""

    def __init__(self, handed: Handed, then: DraftPolicy):
        self.handed, self.then = handed, then
        self._is_handed = False

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Bind the policy that goes on."""
        self.then.bind(self.handed.then, pass_seconds)

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """One for each row; the loop cuts it to what may still be emitted."""
        rests = [len(self.handed.rest(seq)) for seq in seqs]
        self._is_handed = any(rests)
        return [DraftBudget(n, n, ARM) for n in rests] if self._is_handed else self.then.budgets(seqs)

    def observe(self, seq: Sequence, record: Round) -> None:
        """Rounds of handed answers teach nothing about the drafter."""
        if not self._is_handed:
            self.then.observe(seq, record)

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        self.then.release(slots)
