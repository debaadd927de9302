"""Policies that measure no costs: `Fixed` and `Dynamic`."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, final

from pydantic import Field

from ..core.interfaces import DraftBudget, Drafter, DraftPolicy, TargetExperts
from ..core.request import TokenSequence
from ..core.round import Round
from ..errors import ConfigError
from ..schema import checked_call
from .constants import FIRST_ACCEPTED, GROWTH, NEWEST_WEIGHT


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

    def bind(
        self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True,
        experts: TargetExperts | None = None,
    ) -> None:  # fmt: skip
        self._drafter = drafter

    def budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        if self._depth == 0:
            return [DraftBudget(0, 0)] * len(seqs)
        return [DraftBudget(self._depth, self._nodes, first_ready(self._drafter, seq)) for seq in seqs]


def first_ready(drafter: Drafter | None, seq: TokenSequence) -> int:
    """The first member of a combined drafter with something to propose; 0 where none has."""
    if drafter is None:
        return 0
    return next((index for index, offer in enumerate(drafter.draft_options(seq)) if offer.hint >= 0), 0)


@final
class Dynamic(DraftPolicy):
    """Draft one token more than was accepted lately; stop after a token with which the whole draft becomes unlikely.

    max_tokens, min_tokens: the bounds of the window.
    min_chance: the smallest probability of the whole chain, as the product of the drafter's confidences. The token that
        falls below it is kept, so that the stop does not depend on a token that is missing from its own draft. Drafters
        without confidences are bounded by the window alone.
    num_nodes: the candidates of a tree; None for as many as the window.
    """

    @checked_call
    def __init__(
        self,
        max_tokens: Annotated[int, Field(ge=1)] = 16,
        min_tokens: Annotated[int, Field(ge=1)] = 1,
        min_chance: Annotated[float, Field(ge=0, le=1)] = 0.3,  # 0: never stop early
        num_nodes: Annotated[int, Field(ge=1)] | None = None,
    ):
        if min_tokens > max_tokens:
            got = f"min {min_tokens}, max {max_tokens}"
            raise ConfigError("the window is empty", got=got, expected="1 <= min <= max")
        self.num_nodes = num_nodes
        self.max_tokens, self.min_tokens, self.min_chance = max_tokens, min_tokens, min_chance
        self._accepted: dict[int, float] = {}  # by slot, the moving average of accepted tokens
        self._drafter: Drafter | None = None

    def bind(
        self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True,
        experts: TargetExperts | None = None,
    ) -> None:  # fmt: skip
        self._drafter, self._accepted = drafter, {}

    def budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        return [self._budget(seq) for seq in seqs]

    def _budget(self, seq: TokenSequence) -> DraftBudget:
        depth = round(self._accepted.get(seq.slot, FIRST_ACCEPTED)) + 1
        depth = max(self.min_tokens, min(depth, self.max_tokens))
        return DraftBudget(depth, max(depth, self.num_nodes or 0), first_ready(self._drafter, seq), self._is_likely)

    def _is_likely(self, confidences: Sequence[float]) -> bool:
        return len(confidences) < self.min_tokens or math.prod(confidences) >= self.min_chance

    def observe(self, seq: TokenSequence, record: Round) -> None:
        """Move the average of accepted tokens; a draft that was accepted whole could have been longer."""
        if record.num_drafted == 0:
            return
        whole = record.num_accepted == record.num_drafted
        target = record.num_accepted + (GROWTH if whole else 0)
        accepted = self._accepted.get(seq.slot, FIRST_ACCEPTED)
        self._accepted[seq.slot] = min(accepted + NEWEST_WEIGHT * (target - accepted), float(self.max_tokens))

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._accepted.pop(slot, None)
