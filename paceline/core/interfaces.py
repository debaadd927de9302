"""The three roles of the loop: a drafter proposes, a verifier decides, a policy sets the budget."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from ..errors import ConfigError
from .draft import Draft
from .request import TokenSequence
from .round import Round
from .vision import PromptImage
from .walk import TargetDistribution, Walk

NOTHING_PROPOSED = "the drafter found nothing to propose"
"""Why an answer has no draft, see `DraftPolicy.no_draft_reason`."""


@dataclass(frozen=True)
class DraftBudget:
    """The most a drafter may propose: `depth` tokens in a row, `nodes` candidates and masks (root not counted).

    drafter_index: which member of a combined drafter drafts.
    should_continue: called after each drafted token with the drafter's probabilities so far. False ends the draft after
        that token, which is kept: dropping it would bias the result by a token that the draft no longer has.
    min_probs: of a tree: the least probability of the path to its best, second best, ... candidate, by the drafter's
        confidences. Never descending, since larger passes take longer. Empty: every candidate is drafted.
    """

    depth: int
    nodes: int
    drafter_index: int = 0
    should_continue: Callable[[Sequence[float]], bool] | None = None
    min_probs: Sequence[float] = ()

    def min_prob(self, n: int) -> float:
        """The least probability of the candidate that comes behind `n` others."""
        return self.min_probs[min(n, len(self.min_probs) - 1)] if self.min_probs else 0.0


@dataclass(frozen=True)
class DraftOptions:
    """What a drafter can do for a sequence in this round; the policy reads it before it sets the budget.

    source: the name under which acceptance is recorded.
    hint: a class of situations whose acceptance is estimated separately (for lookup the length of the match). Negative:
        it has no draft.
    uncached_tokens: how many tokens of the text the drafter must still cache before it can draft.
    branches: the most children of a node, masks included; 1 for a chain.
    masks: the most mask tokens below a node, from whose predictions the next round drafts.
    ready: how many tokens in a row it can draft now. A drafter with masks has the predictions of the last round; at 0
        it adds masks, and drafts no more than copies.
    probes: how many rows a draft of any size adds to the target's pass, such as Lookahead's window.
    at_once: whether a draft of any depth takes one drafting step, as with parallel heads.
    """

    source: str
    hint: int = 0
    uncached_tokens: int = 0
    branches: int = 1
    masks: int = 0
    ready: int = 1 << 30
    probes: int = 0
    at_once: bool = False

    def steps(self, depth: int) -> int:
        """How many drafting steps a draft of this depth takes."""
        return min(depth, 1) if self.at_once else depth


@runtime_checkable
class Target(Protocol):
    """The target as drafters see it; `target.ModelRunner` implements it."""

    @property
    def loaded(self) -> Any:
        """The model: a `target.loaded.LoadedModel`."""
        ...

    @property
    def cache(self) -> Any:
        """Its keys and values, an `attention.kv_cache.SlotCache`."""
        ...

    @property
    def vocab_size(self) -> int:
        """V; every drafted token is below it."""
        ...

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Placeholders of images, which no draft may contain."""
        ...

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, prompt included."""
        ...

    @property
    def num_slots(self) -> int:
        """How many sequences can be decoded at once; `TokenSequence.slot` is below it."""
        ...

    def watch_states(self, layers: Iterable[int]) -> None:
        """Store these hidden states from now on, in rounds of drafters with `DrafterInfo.reads_states`."""
        ...

    def read_states(self, slot: int, begin: int, end: int, layers: Sequence[int]) -> Tensor:
        """The watched states of cached tokens `begin` to `end`, concatenated. [M, len(layers) E]."""
        ...

    def attach_adapter(self, adapter: Any) -> Any:
        """Accept the mask tokens of a `methods.space.adapter.SpaceAdapter`; returns the attached copy of it."""
        ...

    def restored_on_error(self) -> AbstractContextManager[None]:
        """If the body raises, restore the adapter that was attached before, or none."""
        ...

    def sharing_cache(self, change: Callable[[Any], None]) -> Any:
        """A `ModelRunner` for a copy of this model on the same cache. `change` replaces layers of the copy in place."""
        ...

    def open_model(self, model: Any, dtype: Any = None, device: Any = None, weights: Any = None) -> Any:
        """Load another model, in this one's dtype and on its device by default; of a loaded one, a quantised copy."""
        ...

    def run_model(self, model: Any) -> Any:
        """A runner of another loaded model, for as many sequences, and no longer ones."""
        ...

    def share_vision_tower(self, vision: Any) -> Any:
        """A draft's vision half with this model's tower in it, which encodes each image once for both."""
        ...

    def image_features(self, images: Sequence[PromptImage]) -> list[Any]:
        """The features of each image by this model's vision half."""
        ...

    def keep_images(self) -> None:
        """Keep the opened images of prompts from now on, as `PromptImage.source`."""
        ...


@dataclass(frozen=True)
class DrafterInfo:
    """The properties of a drafter that hold for every sequence.

    branches: the most children that it gives a node, masks included; 1 for chains.
    reads_states: whether it reads the target's hidden states; otherwise they are not stored.
    drafts_during_prefill: whether it can draft before the prefill is complete, since it reads neither the target's
        states nor its cache.
    members: the members of a combined drafter, in the order of `DraftBudget.drafter_index`.
    """

    branches: int = 1
    reads_states: bool = False
    drafts_during_prefill: bool = False
    members: tuple["DrafterInfo", ...] = ()

    def member(self, drafter_index: int) -> "DrafterInfo":
        """The info of the member with this index; of the drafter itself if it is not combined."""
        return self.members[drafter_index] if self.members else self


class InnerDecoder(Protocol):
    """Decodes with a draft model and a drafter for it."""

    @property
    def drafter(self) -> "Drafter":
        """The drafter for the draft model."""
        ...

    def step(self, seqs: Sequence[TokenSequence]) -> None:
        """One round, as of `engine.loop.SpeculativeDecoder`."""
        ...

    def reset_slot(self, slot: int) -> None:
        """Drop what is known of a slot."""
        ...


MakeDecoder = Callable[[Any, "Drafter"], InnerDecoder]
"""(the runner of a draft model, a drafter for it) -> what decodes with both."""


class Drafter(ABC):
    """Proposes tokens. State is keyed by slot and lives until `release`.

    A drafter may propose nothing (a tree of roots): the round is then a plain decoding step. A sequence may be new, or
    may have had rounds that this drafter did not draft for; everything it needs is in `token_ids`.
    Where it lacks memory or a file it raises: the round goes on without a draft, after `release`.

    name: the drafter's name in results. labels: those of the members of a combined drafter.
    info: its properties, which may change when it is bound.
    banned_token_ids: the tokens that it must not draft; set by `bind`.
    has_lacked: whether memory or a file failed it once; set by the loop, which went on without its draft.
    """

    name: ClassVar[str]
    labels: tuple[str, ...] = ()
    info: DrafterInfo = DrafterInfo()
    bound_to: tuple[Target, bool] | None = None  # and whether the verifier is exact; set by `bind_once`
    banned_token_ids: frozenset[int] = frozenset()
    has_lacked: bool = False

    def bind(self, target: Target, verifier: "Verifier") -> None:
        """Prepare to draft for a target and a verifier. Raises if the drafter cannot work with them."""
        self.banned_token_ids = target.banned_token_ids

    def bind_inner(self, decoder: MakeDecoder) -> None:
        """Take a decoder for a model that drafts with a drafter of its own. Called after `bind`."""

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The options for this round: one entry, or one for each member of a combined drafter."""
        return (DraftOptions(self.name),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Measure the seconds of a drafting step and of an uncached token, by source; empty if that is not possible."""
        return {}

    def metrics(self) -> Mapping[str, tuple[str, float]]:
        """Further metrics of a server, by name: what each is, and its value."""
        return {}

    @abstractmethod
    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Draft for each sequence within its budget; row b of the tree starts at `seqs[b].token_ids[-1]`.

        Not called in rounds where no sequence has a budget.
        """

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Learn from the round. Called after the sequences took their tokens, before finished ones are released.

        draft: the draft that was verified, without tokens that a request's grammar forbids.
        logits: those of the target at every node of the draft, [B, N, V].
        """

    def release(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots; harmless for unknown slots."""


def bind_once(drafter: Drafter, target: Target, verifier: "Verifier") -> None:
    """Bind a drafter, if it is not bound to this target and such a verifier.

    Raises `ConfigError` if it is bound to others: its state is keyed by slot, and it drafts for a kind of verifier.
    """
    if not isinstance(getattr(drafter, "name", None), str):
        kind = type(drafter).__name__
        raise ConfigError(f"the drafter {kind} has no name", fix=f'name = "{kind.lower()}" in its class')
    if drafter.bound_to is None:
        drafter.bind(target, verifier)
        drafter.bound_to = target, verifier.exact
    elif drafter.bound_to != (target, verifier.exact):
        owner = "another LLM" if drafter.bound_to[0] is not target else "an LLM with another kind of verifier"
        message = f"the drafter {drafter.name!r} serves {owner} already"
        raise ConfigError(message, fix="make one drafter for each LLM and kind of verifier")


class Verifier(ABC):
    """Decides which drafted tokens are accepted. It has no state and uses neither cache nor model."""

    name: ClassVar[str]
    lossless: ClassVar[bool]  # the output has the target's distribution
    exact: ClassVar[bool]  # the output is token-identical to plain decoding with the same seed

    @abstractmethod
    def verify(
        self, draft: Draft, distribution: TargetDistribution, seeds: Sequence[int], positions: Sequence[int]
    ) -> list[Walk]:
        """Walk the tree of each row from its root.

        seeds: a signed 64-bit seed for each row.
        positions: the absolute position of the token after the root, for each row.
        """


@dataclass(frozen=True)
class TargetExperts:
    """The experts of a target, for policies. Counts are of distinct ones, added up over layers.

    count: of all there are. read: returns how many the last pass read.
    alike_seconds: as `pass_seconds` of `DraftPolicy.bind`, over rows that share most of their experts.
    """

    count: int
    read: Callable[[], int]
    alike_seconds: Callable[[int], float]


class DraftPolicy(ABC):
    """Sets the budgets of a round and learns from its results. State is keyed by slot and lives until `release`."""

    def bind(
        self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True,
        experts: TargetExperts | None = None,
    ) -> None:  # fmt: skip
        """Prepare for a drafter.

        pass_seconds: runs a target pass over so many rows and returns its seconds.
        pads_trees: whether every tree of a batch takes as many rows of a pass as the largest one.
        experts: those of the target, if it has some and counts them.
        """

    @abstractmethod
    def budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        """The most to draft for each sequence now; the loop limits it to `TokenSequence.most_drafted`."""

    def observe(self, seq: TokenSequence, record: Round) -> None:
        """Learn from the record of a round."""

    def no_draft_reason(self, seq: TokenSequence) -> str | None:
        """Why it has let no drafter draft for this sequence, in words; None if it does not know."""
        return None

    def release(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots; harmless for unknown slots."""
