"""Several drafters: in each round one of them drafts for a sequence, and all of them follow the text.

The policy names the member; `Fixed` and `Dynamic` take the first member that has something to propose.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from ..core.draft import Draft, Law
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, MakeDecoder, Target, Verifier, bind_once
from ..core.request import TokenSequence
from ..core.shortage import spared
from ..core.tree import TokenTree
from ..core.walk import Walk
from ..errors import ConfigError
from ..schema import Many, checked, checked_call
from .spec import DrafterSpec

Part = tuple[Draft, int]
"""A member's draft and the row of it that is meant."""


@final
class Choose(Drafter):
    """Let the policy take the best of several drafters, per sequence and round.

    members: drafters, cheapest first; `DraftBudget.drafter_index` counts them. Raises `ConfigError` for an empty list
    or a Choose among them.
    """

    name: ClassVar[str] = "choose"

    @checked_call
    def __init__(self, members: Sequence[Drafter]):
        if not members:
            raise ConfigError("Choose has nothing to choose from", got="no drafters", expected="at least one drafter")
        if any(isinstance(member, Choose) for member in members):
            raise ConfigError("a Choose is among the members of a Choose", fix="put all drafters into one list")
        self.members = tuple(members)
        self.info = self._info()
        count = Counter(member.name for member in members)
        # What is learnt of a drafter is filed by its name, so that no two may share one.
        self.labels = tuple(
            member.name if count[member.name] == 1 else f"{member.name}-{index}" for index, member in enumerate(members)
        )

    def _info(self) -> DrafterInfo:
        each = tuple(member.info for member in self.members)
        return DrafterInfo(
            branches=max(info.branches for info in each),
            reads_states=any(info.reads_states for info in each),
            drafts_during_prefill=any(info.drafts_during_prefill for info in each),
            members=each,
        )

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Bind every member. Where one does not fit, the target is left as it was, and what that member raised."""
        with target.restored_on_error():
            for member in self.members:
                bind_once(member, target, verifier)
        self.info = self._info()

    def bind_inner(self, decoder: MakeDecoder) -> None:
        for member in self.members:
            member.bind_inner(decoder)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        return [self._options(*pair, seq) for pair in zip(self.members, self.labels, strict=True)]

    def _options(self, member: Drafter, label: str, seq: TokenSequence) -> DraftOptions:
        if _may(label, seq):
            with spared(member, [seq]):
                return replace(member.draft_options(seq)[0], source=label)
        return DraftOptions(label, hint=-1)

    def seconds(self) -> Mapping[str, tuple[float, float]]:
        costs_of: dict[str, tuple[float, float]] = {}
        for member, label in zip(self.members, self.labels, strict=True):
            costs_of.update((label, costs) for costs in member.seconds().values())
        return costs_of

    def metrics(self) -> Mapping[str, tuple[str, float]]:
        return {name: pair for member in self.members for name, pair in member.metrics().items()}

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        """Each row by the member its budget names; others stay empty, also those of one that cannot draft."""
        parts: list[Part | None] = [None] * len(seqs)
        for drafter_index, (member, label) in enumerate(zip(self.members, self.labels, strict=True)):
            rows = [
                row
                for row, (seq, budget) in enumerate(zip(seqs, budgets, strict=True))
                if budget.drafter_index == drafter_index and budget.depth > 0 and _may(label, seq)
            ]
            member_seqs = [seqs[row] for row in rows]
            if rows:
                with spared(member, member_seqs):
                    draft = member.propose(member_seqs, [budgets[row] for row in rows])
                    draft = replace(draft, source=label, sources=None)
                    for place, row in enumerate(rows):
                        parts[row] = draft, place
        empty = Draft(TokenTree.chain([[seq.token_ids[-1]] for seq in seqs]), source=self.name)
        return merged([part or (empty, row) for row, part in enumerate(parts)])

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Every member sees every row, also those of the others: that is how it stays in step."""
        for member in self.members:
            with spared(member, seqs):
                member.observe(seqs, draft, logits, walks)

    def release(self, slots: Sequence[int]) -> None:
        for member in self.members:
            member.release(slots)


@checked
class ChooseSpec(DrafterSpec):
    """Several drafters, of which the policy takes the best."""

    drafters: Many[DrafterSpec]
    method = "choose"

    @property
    def name(self) -> str:
        return "+".join(member.name for member in self.drafters)

    @property
    def parts(self) -> tuple[DrafterSpec, ...]:
        return self.drafters

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(model for member in self.drafters for model in member.models)

    def tree_nodes(self, depth: int) -> int | None:
        return max((nodes for member in self.drafters if (nodes := member.tree_nodes(depth)) is not None), default=None)

    def as_dict(self) -> dict[str, object]:
        return {"drafters": [{"method": member.method, **member.as_dict()} for member in self.drafters]}

    def build(self) -> Choose:
        return Choose([member.build() for member in self.drafters])


def _may(label: str, seq: TokenSequence) -> bool:
    return seq.params.method in (None, label)


def merged(parts: list[Part]) -> Draft:
    """A draft of these rows, in this order."""
    tree = TokenTree.of([draft.tree.rows[row] for draft, row in parts], parts[0][0].tree.device)
    law, q = _common_law(parts, tree.num_nodes)
    confidence = None
    if any(draft.confidence is not None for draft, _ in parts):
        confidence = torch.full((len(parts), tree.num_nodes), torch.nan)  # NaN where a member gave none
        for padded, (draft, row) in zip(confidence, parts, strict=True):
            if draft.confidence is not None:
                padded[: draft.tree.num_nodes] = draft.confidence[row].cpu()
    return Draft(
        tree,
        law,
        q,
        source=Choose.name,
        sources=tuple(draft.source for draft, _ in parts),
        confidence=confidence,
        hints=tuple(0 if draft.hints is None else draft.hints[row] for draft, row in parts),
    )


def _common_law(parts: list[Part], width: int) -> tuple[Law, Tensor | None]:
    """The law that all rows have, with its q [B, N, V]; where they differ POINT_MASS, which holds for any draft."""
    laws = {draft.law for draft, row in parts if len(draft.tree.rows[row].candidates) > 1}
    law = laws.pop() if len(laws) == 1 else Law.POINT_MASS
    drawn = {b: (draft.q, row) for b, (draft, row) in enumerate(parts) if draft.law is law and draft.q is not None}
    if law is Law.POINT_MASS or not drawn:
        return law, None
    first = next(iter(drawn.values()))[0]
    q = first.new_zeros(len(parts), width, first.shape[-1])
    for b, (member_q, row) in drawn.items():
        q[b, : member_q.shape[1]] = member_q[row]
    return law, q
