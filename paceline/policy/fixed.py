"""The same number of tokens every round."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Annotated, final

from pydantic import Field

from ..core.interfaces import DraftBudget, Drafter, DraftPolicy
from ..core.request import Sequence
from ..schema import checked_call


@final
class Fixed(DraftPolicy):
    """Draft `num_speculative_tokens` tokens in a row; trees may spend `num_nodes` candidates on them (None: as many).

    Of combined drafters the first that has something to propose drafts.
    """

    @checked_call
    def __init__(
        self,
        num_speculative_tokens: Annotated[int, Field(ge=0)] = 5,
        num_nodes: Annotated[int, Field(ge=0)] | None = None,
    ):
        self._depth = num_speculative_tokens
        self._nodes = num_speculative_tokens if num_nodes is None else num_nodes
        self._drafter: Drafter | None = None

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Remember the drafter, to ask it who can draft."""
        self._drafter = drafter

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """The fixed budget for everyone."""
        if self._depth == 0:
            return [DraftBudget(0, 0)] * len(seqs)
        return [DraftBudget(self._depth, self._nodes, first_arm(self._drafter, seq)) for seq in seqs]


def first_arm(drafter: Drafter | None, seq: Sequence) -> int:
    """The first member with something to propose; 0 where nobody has, or nobody was asked."""
    if drafter is None:
        return 0
    return next((drafter_index for drafter_index, look in enumerate(drafter.draft_options(seq)) if look.hint >= 0), 0)
