"""The three roles of the loop: a drafter proposes, a verifier decides, a policy sets the budget."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ..errors import ConfigError
from .draft import Draft
from .outputs import Round, TargetLaw, TargetOutput, VerifyOutput
from .request import Sequence


@dataclass(frozen=True)
class DraftBudget:
    """The most a drafter may propose: `depth` tokens in a row, `nodes` candidates in all (root not counted).

    arm: which of a combined drafter's members drafts. goes_on: asked after each drafted token with the drafter's own
    probabilities so far; False ends the draft, with that token kept. (Dropping it would make the stop depend on a
    token that is then missing from its law: keep-then-stop is safe under every rule.) least: a node that stands with
    less than this probability, by the drafter's confidences along its path, costs more than it brings; for trees.
    """

    depth: int
    nodes: int
    arm: int = 0
    goes_on: Callable[[Seq[float]], bool] | None = None
    least: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """What a drafter could do for a sequence now, before it is asked to.

    hint: its class of the situation, by which acceptance is learnt (lookup: length of the match); negative: it has
    nothing to propose. pending: tokens it must read first. branches: the most children it gives a node; 1: a chain.
    masks: the most mask tokens it hangs below the root and below each candidate, rows of the target's pass all of them.
    ready: tokens in a row that it can draft now; of a drafter with masks those that last round's masks foresee, and
    at 0 it hangs masks in this round and drafts in the next.
    """

    source: str
    hint: int = 0
    pending: int = 0
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
    def undraftable(self) -> frozenset[int]:
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

    def drafts_unread(self, arm: int | None = None) -> bool:
        """Whether it can draft before the target has read the prompt's end: it reads no states, and not its cache.

        arm: which member of a combined drafter is meant; None: whether any of them can.
        """
        return False

    def outlook(self, seq: Sequence) -> Seq[Outlook]:
        """What could be drafted now: one entry, or one for each member of a combined drafter."""
        return (Outlook(self.name),)

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
    def verify(self, draft: Draft, law: TargetLaw, seeds: Seq[int], positions: Seq[int]) -> VerifyOutput:
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
