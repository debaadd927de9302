"""Draft length by recent acceptance and by the drafter's own confidence; no clock, no measuring."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Annotated, final

from pydantic import Field

from ..core.interfaces import DraftBudget, Drafter, DraftPolicy
from ..core.outputs import Round
from ..core.request import Sequence
from ..errors import ConfigError
from ..schema import checked_call
from .fixed import first_arm

_FIRST = 4.0
_GROWTH = 2  # tokens beyond a draft that stood whole, as Hugging Face's heuristic schedule adds
_WEIGHT = 0.5  # of the newest round


@final
class Dynamic(DraftPolicy):
    """Draft one token more than lately stood; stop after a token with which the whole draft becomes unlikely.

    max_tokens, min_tokens: bounds of the window. min_chance: of the whole chain, the product of the drafter's
    confidences; the token that falls below it is kept, so that the stop does not depend on a token missing from its
    own law. Drafters without confidence are bounded by the window alone. num_nodes: of trees; None: as the window.
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
            raise ConfigError(
                "the window is empty", got=f"min {min_tokens}, max {max_tokens}", expected="1 <= min <= max"
            )
        self.num_nodes = num_nodes
        self.max_tokens, self.min_tokens, self.min_chance = max_tokens, min_tokens, min_chance
        self._stood: dict[int, float] = {}  # by slot, the moving average of accepted tokens
        self._drafter: Drafter | None = None

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Remember the drafter, to ask it who can draft."""
        self._drafter, self._stood = drafter, {}

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """A window for each row."""
        return [self._budget(seq) for seq in seqs]

    def _budget(self, seq: Sequence) -> DraftBudget:
        depth = round(self._stood.get(seq.slot, _FIRST)) + 1
        depth = max(self.min_tokens, min(depth, self.max_tokens))
        return DraftBudget(depth, max(depth, self.num_nodes or 0), first_arm(self._drafter, seq), self._goes_on)

    def _goes_on(self, confidences: Seq[float]) -> bool:
        return len(confidences) < self.min_tokens or math.prod(confidences) >= self.min_chance

    def observe(self, seq: Sequence, record: Round) -> None:
        """A draft that stood whole could have been longer; one refused early should have been shorter."""
        if record.num_drafted == 0:
            return
        whole = record.num_accepted == record.num_drafted
        target = record.num_accepted + (_GROWTH if whole else 0)
        stood = self._stood.get(seq.slot, _FIRST)
        self._stood[seq.slot] = min(stood + _WEIGHT * (target - stood), float(self.max_tokens))

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._stood.pop(slot, None)
