"""The three roles of the loop: a drafter proposes, a verifier decides, a policy sets the budget."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ..errors import ConfigError
from .draft import Draft
from .outputs import Round, TargetDistribution, TargetOutput, VerifyOutput
from .request import Sequence


@dataclass(frozen=True)
class DraftBudget:
    """The most a drafter may propose: `depth` tokens in a row, `nodes` candidates in all (root not counted).

    drafter_index: which member of a combined drafter drafts.
    should_continue: called after each drafted token with the drafter's own probabilities so far. False ends the draft
        with that token kept: dropping it would make the stop depend on a token that the draft no longer shows.
    min_prob: for trees. Nodes whose path has a smaller probability, by the drafter's confidences, are not drafted.
    """

    depth: int
    nodes: int
    drafter_index: int = 0
    should_continue: Callable[[Seq[float]], bool] | None = None
    min_prob: float = 0.0


@dataclass(frozen=True)
class DraftOptions:
    """What a drafter could do for a sequence in this round; the policy reads it before it sets the budget.

    source: the name under which acceptance is recorded.
    hint: the situation, by which acceptance is estimated (for lookup the length of the match). Negative: no draft.
    uncached_tokens: tokens of the text that the drafter must read before it can draft.
    branches: the most children of a node; 1 for a chain.
    masks: the most mask tokens below the root and below each candidate. Each of them is a row of the target's pass.
    ready: how many tokens in a row it can draft now. A drafter with masks drafts what last round's masks predicted;
        at 0 it adds masks in this round and drafts in the next.
    """

    source: str
    hint: int = 0
    uncached_tokens: int = 0
    branches: int = 1
    masks: int = 0
    ready: int = 1 << 30


@runtime_checkable
class Target(Protocol):
    """What every drafter may know of the model it drafts for; those that need more ask for a `ModelRunner`."""

    max_length: int

    @property
    def vocab_size(self) -> int:
        """Tokens the target can emit."""
        ...

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that stand for pictures: no draft may hold one."""
        ...


class Drafter(ABC):
    """Proposes tokens. State is keyed by slot and lives until `release`.

    A drafter may propose nothing (a tree of roots): the round is then a plain decoding step. It may meet a sequence
    for the first time, or again after rounds it did not draft for: everything it needs stands in `token_ids`.
    """

    name: ClassVar[str]
    bound_to: Target | None = None  # set by `bind_once`

    def bind(self, target: Target, verifier: "Verifier") -> None:
        """Meet the target and the rule that will judge the drafts; refuse here what cannot work."""

    @property
    def branches(self) -> int:
        """The most children that it gives a node; 1 for chains."""
        return 1

    @property
    def masks(self) -> int:
        """The most mask tokens that it hangs below a node, rows of the target's pass; 0 for most."""
        return 0

    @property
    def reads_states(self) -> bool:
        """Whether it reads the target's hidden states; only then are they kept while it drafts."""
        return False

    def drafts_during_prefill(self, drafter_index: int | None = None) -> bool:
        """Whether it can draft before the target has read the prompt's end: it reads no states, and not its cache.

        drafter_index: which member of a combined drafter is meant; None: whether any of them can.
        """
        return False

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """What could be drafted now: one entry, or one for each member of a combined drafter."""
        return (DraftOptions(self.name),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Measured now, by source: seconds per drafted token and per pending token; empty where nothing is known."""
        return {}

    @abstractmethod
    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """Draft for each sequence within its budget; row b of the tree starts at `seqs[b].token_ids[-1]`."""

    def observe(self, seqs: Seq[Sequence], draft: Draft, out: TargetOutput, verdict: VerifyOutput) -> None:
        """Learn from the verdict. Called after the sequences took their tokens, before finished ones are released."""

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots; safe for slots never seen."""


def bind_once(drafter: Drafter, target: Target, verifier: "Verifier") -> None:
    """Bind a drafter. Raises `ConfigError` where it serves another target already: its state is keyed by slot."""
    if drafter.bound_to not in (None, target):
        raise ConfigError(
            f"the drafter {drafter.name!r} serves another LLM already", fix="make one drafter for each LLM"
        )
    drafter.bind(target, verifier)
    drafter.bound_to = target


class Verifier(ABC):
    """Decides which drafted tokens stand. Pure: no cache, no model, no state."""

    name: ClassVar[str]
    lossless: ClassVar[bool]  # the output follows the target's law
    exact: ClassVar[bool]  # the output is token-identical to plain decoding with the same seed

    @abstractmethod
    def verify(self, draft: Draft, law: TargetDistribution, seeds: Seq[int], positions: Seq[int]) -> VerifyOutput:
        """Walk each tree from its root. One 64-bit seed for each row, signed.

        positions: for each row the absolute position of the token after the root.
        """


class DraftPolicy(ABC):
    """Sets the budgets of a round and learns from what came of it. State is keyed by slot and lives until `release`."""

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Meet the drafter; `pass_seconds(rows)` measures one target pass, which takes that long."""

    @abstractmethod
    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """The most to draft for each sequence now; the loop cuts it to the tokens that may still be emitted."""

    def observe(self, seq: Sequence, record: Round) -> None:
        """See what became of the round."""

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots; safe for slots never seen."""
