"""The three roles of the loop: a drafter proposes, a verifier decides, a policy sets the budget."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import ConfigError, IncompatibleModels
from .draft import Draft
from .outputs import Round, TargetDistribution, Walk
from .request import Sequence
from .vision import PromptImage


@dataclass(frozen=True)
class DraftBudget:
    """The most a drafter may propose: `depth` tokens in a row, `nodes` candidates in all (root not counted).

    drafter_index: which member of a combined drafter drafts.
    should_continue: called after each drafted token with the drafter's own probabilities so far. False ends the draft
        with that token kept: dropping it would make the stop depend on a token that the draft no longer shows.
    min_prob: the smallest probability of a path in a tree, by the drafter's confidences; others are not drafted.
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
    ready: how many tokens in a row it can draft now: with masks, what last round's predicted; at 0 it adds masks.
    probes: rows of the target's pass that a draft adds whatever its size, such as Lookahead's window.
    """

    source: str
    hint: int = 0
    uncached_tokens: int = 0
    branches: int = 1
    masks: int = 0
    ready: int = 1 << 30
    probes: int = 0


_SCALED_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelFacts:
    """What is known of a loaded model. To be read only.

    model: the `transformers` model.
    tokenizer: its tokenizer, or None.
    name: as it was asked for, or its folder.
    context: the most tokens that a sequence may have.
    fingerprint: identifies the checkpoint, see `hf.fingerprint`.
    vision: the vision half of a vision-language model, of which `model` is the text half.
    """

    model: Any
    tokenizer: Any
    name: str
    context: int
    fingerprint: str
    vision: Any = None

    @cached_property
    def vocab_size(self) -> int:
        """V, the rows of the output head, padding included."""
        return self.model.get_output_embeddings().out_features

    @property
    def embeddings(self) -> Tensor:
        """The token embeddings [V, E]."""
        return self.model.get_input_embeddings().weight

    @property
    def device(self) -> torch.device:
        """Where the token embeddings lie."""
        return self.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers; also the index of the last hidden state, which has been through the final norm."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """E, the width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    def output_rows(self) -> Tensor:
        """The output head [V, E], for drafters and for training.

        Raises `IncompatibleModels` where its rows are quantised, or where logits are not just their products with the
        last state: a head would learn, and draft from, another distribution.
        """
        config, head = self.model.config.get_text_config(), self.model.get_output_embeddings()
        extras = [name for name in _SCALED_LOGITS if getattr(config, name, None) not in (None, 0, 1)]
        if getattr(head, "bias", None) is not None:
            extras.append("a bias of the output layer")
        if extras:
            what = "heads cannot draft for this target yet: its logits are more than output rows times states"
            raise IncompatibleModels(what, got=", ".join(extras), expected="a model without them")
        rows = self.embeddings if getattr(config, "tie_word_embeddings", False) else getattr(head, "weight", None)
        if not isinstance(rows, Tensor) or not rows.is_floating_point():
            raise IncompatibleModels(
                "this head drafts with the target's output rows, and they are quantised",
                got=type(head).__name__,
                expected="rows in floating point, or a head with an output layer of its own",
                fix="load the target without quantised weights",
            )
        return rows


@runtime_checkable
class TargetView(Protocol):
    """What a drafter may use of the model it drafts for; `runner.ModelRunner` implements it."""

    @property
    def loaded(self) -> ModelFacts:
        """The model."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: drafted tokens are below it."""
        ...

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that stand for images: no draft may hold one."""
        ...

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence, prompt included."""
        ...

    @property
    def num_slots(self) -> int:
        """Sequences that can be decoded at once; `Sequence.slot` is below it."""
        ...

    def watch_states(self, layers: Iterable[int]) -> None:
        """Have these hidden states kept from now on, for drafters whose `info` says `reads_states`."""
        ...

    def read_states(self, slot: int, begin: int, end: int, layers: Seq[int]) -> Tensor:
        """The watched states of cached tokens `begin` to `end`, side by side. [M, len(layers) E]."""
        ...

    def attach_adapter(self, adapter: Any) -> Any:
        """Let passes take the mask tokens of a `modules.SpaceAdapter`; returns the copy that is attached."""
        ...

    def restored_on_error(self) -> AbstractContextManager[None]:
        """Where what is inside raises, no adapter stays attached that was not attached before."""
        ...

    def sharing_cache(self, change: Callable[[Any], None]) -> Any:
        """A `ModelRunner` of a copy of this model on its cache; `change` replaces layers of the copy in place."""
        ...

    def share_vision_tower(self, vision: Any) -> Any:
        """The vision half of a draft with this model's tower in it, which sees each image once for both."""
        ...

    def image_features(self, images: Seq[PromptImage]) -> list[Any]:
        """What this model's vision half makes of each image."""
        ...

    def pass_seconds(self, rows: int) -> float:
        """Measures a pass over a chain of so many tokens."""
        ...


@dataclass(frozen=True)
class DrafterInfo:
    """What holds of a drafter for every sequence.

    branches: the most children that it gives a node; 1 for chains.
    masks: the most mask tokens that it adds below a node. Each of them is a row of the target's pass.
    reads_states: it reads the target's hidden states; only then are they kept while it drafts.
    drafts_during_prefill: it can draft before the target has read the end of the prompt, since it reads neither the
        target's states nor its cache.
    members: the members of a combined drafter, in the order of `DraftBudget.drafter_index`.
    """

    branches: int = 1
    masks: int = 0
    reads_states: bool = False
    drafts_during_prefill: bool = False
    members: tuple["DrafterInfo", ...] = ()

    def member(self, drafter_index: int) -> "DrafterInfo":
        """The drafter that a budget with this index means."""
        return self.members[drafter_index] if self.members else self


class Drafter(ABC):
    """Proposes tokens. State is keyed by slot and lives until `release`.

    A drafter may propose nothing (a tree of roots): the round is then a plain decoding step. It may meet a sequence
    for the first time, or again after rounds it did not draft for: everything it needs is in `token_ids`.

    name: the drafter's name in results.
    info: its properties, which may change when it is bound.
    banned_token_ids: those of the target; empty until it is bound.
    """

    name: ClassVar[str]
    info: DrafterInfo = DrafterInfo()
    bound_to: TargetView | None = None  # set by `bind_once`
    banned_token_ids: frozenset[int] = frozenset()

    def bind(self, target: TargetView, verifier: "Verifier") -> None:
        """Meet the target and the rule that will judge the drafts; refuse here what cannot work."""
        self.banned_token_ids = target.banned_token_ids

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """What could be drafted now: one entry, or one for each member of a combined drafter."""
        return (DraftOptions(self.name),)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        """Measured now, by source: seconds per drafted token and per uncached token; empty where nothing is known."""
        return {}

    @abstractmethod
    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """Draft for each sequence within its budget; row b of the tree starts at `seqs[b].token_ids[-1]`.

        Not called in rounds where no sequence has a budget.
        """

    def observe(self, seqs: Seq[Sequence], draft: Draft, logits: Tensor, walks: Seq[Walk]) -> None:
        """Learn from the round. Called after the sequences took their tokens, before finished ones are released.

        draft: as it was verified: without the tokens that a request's grammar forbids.
        logits: of the target at every node of the draft, [B, N, V].
        """

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots; safe for slots never seen."""


def bind_once(drafter: Drafter, target: TargetView, verifier: "Verifier") -> None:
    """Bind a drafter. Raises `ConfigError` where it serves another target already: its state is keyed by slot."""
    if not isinstance(getattr(drafter, "name", None), str):
        kind = type(drafter).__name__
        raise ConfigError(f"the drafter {kind} has no name", fix=f'name = "{kind.lower()}" in its class')
    if drafter.bound_to not in (None, target):
        what = f"the drafter {drafter.name!r} serves another LLM already"
        raise ConfigError(what, fix="make one drafter for each LLM")
    drafter.bind(target, verifier)
    drafter.bound_to = target


class Verifier(ABC):
    """Decides which drafted tokens are accepted. Pure: no cache, no model, no state."""

    name: ClassVar[str]
    lossless: ClassVar[bool]  # the output has the target's distribution
    exact: ClassVar[bool]  # the output is token-identical to plain decoding with the same seed

    @abstractmethod
    def verify(
        self, draft: Draft, distribution: TargetDistribution, seeds: Seq[int], positions: Seq[int]
    ) -> list[Walk]:
        """Walk each row's tree from its root. One 64-bit seed for each row, signed.

        positions: the absolute position of the token after the root, for each row.
        """


class DraftPolicy(ABC):
    """Sets the budgets of a round and learns from what came of it. State is keyed by slot and lives until `release`."""

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True) -> None:
        """Meet the drafter; `pass_seconds(rows)` measures one target pass, which takes that long.

        pads_trees: whether every tree of a batch takes as many rows of a pass as the largest one.
        """

    @abstractmethod
    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """The most to draft for each sequence now; the loop cuts it to the tokens that may still be emitted."""

    def observe(self, seq: Sequence, record: Round) -> None:
        """See what became of the round."""

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots; safe for slots never seen."""
