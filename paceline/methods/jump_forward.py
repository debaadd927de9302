"""Jump-forward decoding: draft the text that a grammar forces, such as the names of JSON properties.

Zheng et al. 2024 (SGLang). Here it is verified like every draft: the model may encode the same text in other tokens,
and the answer has the tokens that the model chooses.
"""

from collections.abc import Sequence
from typing import ClassVar, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..schema import checked
from .spec import DrafterSpec


@final
class JumpForward(Drafter):
    """Draft the text that the grammar of the request forces, as the tokenizer encodes it.

    Requests without `structured_outputs` get no drafts; combine it with another drafter for them.
    """

    name: ClassVar[str] = "jump-forward"
    info = DrafterInfo(drafts_during_prefill=True)  # it reads tokens only

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is -1 where nothing is forced."""
        count = len(_forced(seq))
        return (DraftOptions(self.name, hint=0 if count else -1, ready=count),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        rows = [
            [seq.token_ids[-1], *(_forced(seq)[: budget.depth] if budget.depth else ())]
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        return Draft(TokenTree.chain(rows), source=self.name)


def _forced(seq: TokenSequence) -> list[int]:
    return [] if seq.grammar is None else seq.grammar.forced(seq.output_ids)


@checked
class JumpForwardSpec(DrafterSpec):
    """No options."""

    method = "jump_forward"
    label = "jump-forward"
    drafter = JumpForward
