"""No drafts: every round is one plain decoding step, in the same loop and with the same kernels."""

from collections.abc import Sequence
from typing import ClassVar

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DraftOptions
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..schema import checked
from .spec import DrafterSpec


class Plain(Drafter):
    """Proposes nothing: the baseline that every speed-up is measured against."""

    name: ClassVar[str] = "none"

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        return (DraftOptions(self.name, hint=-1),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        return Draft(TokenTree.chain([[seq.token_ids[-1]] for seq in seqs]), source=self.name)


@checked
class PlainSpec(DrafterSpec):
    """No drafter."""

    method = "none"
    drafter = Plain
    tokens = 0
