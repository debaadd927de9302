"""The same number of tokens every round."""

from typing import final

from ..core.interfaces import DraftBudget, DraftPolicy
from ..core.request import Sequence
from ..errors import ConfigError


@final
class Fixed(DraftPolicy):
    """Draft `num_speculative_tokens` tokens in a row; trees may spend `num_nodes` candidates on them."""

    def __init__(self, num_speculative_tokens: int = 5, num_nodes: int | None = None):
        if num_speculative_tokens < 0:
            raise ConfigError("num_speculative_tokens is negative", got=num_speculative_tokens, expected=">= 0")
        self._budget = DraftBudget(num_speculative_tokens, num_nodes or num_speculative_tokens)

    def budget(self, seq: Sequence) -> DraftBudget:
        """The fixed budget."""
        return self._budget
