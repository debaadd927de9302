"""Figures that every command shows by one definition. It imports no torch, which `paceline show` does not wait for."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Pass(Protocol):
    """What `tokens_per_pass` reads of a `Round`."""

    @property
    def num_emitted(self) -> int:
        """Tokens appended."""
        ...

    @property
    def with_prompt(self) -> bool:
        """Whether it belongs to the prefill."""
        ...


def tokens_per_pass(rounds: Iterable[Pass]) -> float:
    """Tokens per pass of the target after prefill, its own token included: vLLM's mean acceptance length.

    rounds: of one answer, or of several together. 0 without passes.
    """
    emitted = [one.num_emitted for one in rounds if not one.with_prompt]
    return sum(emitted) / len(emitted) if emitted else 0.0


MIN_TIMED = 8
"""Answers of fewer tokens are shown without a speed: so short a time says nothing."""
