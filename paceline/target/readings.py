"""What requests read while their prompts are read, see `core.reading`. Sums are taken in the order of the text."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.reading import Reading
from ..core.request import TokenLogprob
from ..sampling.scores import token_logprob
from ..system.hardware import one_thread


class PromptLogprobs(Reading):
    """The log-probabilities of each token of a prompt but the first, and of the `k` most probable ones there.

    finish: gives entries their texts. ends: whether no token follows the prompt.
    """

    wants_logits = True

    def __init__(
        self, token_ids: Sequence[int], k: int, finish: Callable[[list[TokenLogprob]], list[TokenLogprob]], ends: bool
    ):
        super().__init__(0, len(token_ids) - 1)
        self._token_ids, self._k, self._finish, self.ends = token_ids, k, finish, ends
        self.restart()

    def restart(self) -> None:
        self.entries: list[TokenLogprob | None] = [None]

    def take(self, rows: Tensor) -> None:
        tokens = self._token_ids[len(self.entries) :]
        with one_thread(rows[0]):
            entries = [token_logprob(row, token, self._k) for row, token in zip(rows, tokens, strict=False)]
        self.entries += self._finish(entries)


class LastState(Reading):
    """The hidden state of the last token."""

    def __init__(self, num_tokens: int):
        super().__init__(num_tokens - 1, num_tokens)

    def restart(self) -> None:
        self._state = torch.empty(0)

    def take(self, rows: Tensor) -> None:
        self._state = rows[-1].float().cpu()

    def pooled(self) -> Tensor:
        """The state, float32 [E]."""
        return self._state


class MeanState(Reading):
    """The mean of the hidden states of all tokens."""

    def __init__(self, num_tokens: int):
        super().__init__(0, num_tokens)

    def restart(self) -> None:
        self._sum = torch.zeros(())

    def take(self, rows: Tensor) -> None:
        for row in rows.float().cpu():  # one by one, so that no chunk changes a bit
            self._sum = self._sum + row

    def pooled(self) -> Tensor:
        """The mean, float32 [E]."""
        return self._sum / self.stop


class Continuation(Reading):
    """The log-probabilities of the last tokens of a text, from number `first` + 1 on."""

    wants_logits = True

    def __init__(self, token_ids: Sequence[int], first: int):
        super().__init__(first, len(token_ids) - 1)
        self._token_ids = token_ids

    def restart(self) -> None:
        self.logprobs = list[float]()

    def take(self, rows: Tensor) -> None:
        tokens = self._token_ids[self.first + 1 + len(self.logprobs) :]
        with one_thread(rows[0]):
            self.logprobs += [token_logprob(row, token, 0).logprob for row, token in zip(rows, tokens, strict=False)]


class NextLogits(Reading):
    """The logits of some tokens as the one after a text."""

    wants_logits = True

    def __init__(self, num_tokens: int, token_ids: Sequence[int]):
        super().__init__(num_tokens - 1, num_tokens)
        self._token_ids = token_ids

    def restart(self) -> None:
        self.logits = torch.empty(0)

    def take(self, rows: Tensor) -> None:
        self.logits = rows[-1, [*self._token_ids]].float().cpu()
