"""A predicted answer as the first draft: the small model's answer, verified by the large model in one pass.

    predicted   yes , it is .      drafted as one chain below the prompt's last token
    target      yes . <eos>        accepts "yes", corrects the next token, and continues with an ordinary drafter

The idea is that of OpenAI's "Predicted Outputs". A wrong prediction costs acceptance and nothing else.
"""

import copy
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import ClassVar, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, DraftPolicy, TargetView, Verifier
from ..core.outputs import Round
from ..core.request import SamplingParams, Sequence
from ..core.tree import TokenTree
from ..decoding import SpeculativeDecoder
from ..drafters import Choose
from ..errors import ConfigError
from ..llm import LLM
from ..outputs import RequestOutput
from ..policy import CostModel


@final
class PredictedOutput(Drafter):
    """Draft what is left of a sequence's predicted answer, as long as its text agrees with the prediction.

    Predictions belong to the sequences that come next, in the order in which they are admitted (see `predict`).
    """

    name: ClassVar[str] = "predicted_output"
    info = DrafterInfo(drafts_during_prefill=True)  # predictions are there before the prompt is read

    def __init__(self):
        self._next: deque[tuple[int, ...]] = deque()
        self._answers: dict[int, tuple[int, ...]] = {}  # by slot

    def bind(self, target: TargetView, verifier: Verifier) -> None:
        """Remember which tokens the target can take."""
        self._vocab_size, self._banned = target.vocab_size, target.banned_token_ids

    def predict(self, answers: Seq[Seq[int]]) -> None:
        """Set the predicted token ids of each sequence to come, empty where there are none; forget older ones."""
        self._next = deque(tuple(answer) for answer in answers)
        self._answers.clear()

    def rest(self, seq: Sequence) -> tuple[int, ...]:
        """The part of the prediction after the text so far; empty where the text differs from it."""
        output = tuple(seq.output_ids)
        if seq.slot not in self._answers:
            self._answers[seq.slot] = self._allowed(self._next.popleft()) if self._next and not output else ()
        answer = self._answers[seq.slot]
        return answer[len(output) :] if answer[: len(output)] == output else ()

    def _allowed(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """The answer up to the first token that no draft may hold."""
        bad = (i for i, token in enumerate(answer) if token >= self._vocab_size or token in self._banned)
        return answer[: next(bad, len(answer))]

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """A draft where something is left of the prediction."""
        return (DraftOptions(self.name, hint=0 if self.rest(seq) else -1),)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """The rest of each prediction within its budget."""
        rows = [
            [seq.token_ids[-1], *self.rest(seq)[: min(budget.depth, budget.nodes)]]
            for seq, budget in zip(seqs, budgets, strict=True)
        ]
        return Draft(TokenTree.chain(rows), source=self.name)

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._answers.pop(slot, None)


@final
class PredictedFirst(DraftPolicy):
    """Draft the whole rest of a prediction at once, since it costs nothing; otherwise follow another policy.

    While some row of a batch has a prediction, the rows without one draft nothing. `predicted` is member 0 of a
    `Choose`.
    """

    def __init__(self, predicted: PredictedOutput, then: DraftPolicy):
        self.predicted, self.then = predicted, then
        self._is_predicted = False

    def bind(self, drafter: Drafter, pass_seconds: Callable[[int], float]) -> None:
        """Bind the other policy."""
        self.then.bind(drafter, pass_seconds)

    def budgets(self, seqs: Seq[Sequence]) -> list[DraftBudget]:
        """One for each row; the loop cuts it to what may still be emitted."""
        rests = [len(self.predicted.rest(seq)) for seq in seqs]
        self._is_predicted = any(rests)
        return [DraftBudget(n, n) for n in rests] if self._is_predicted else self.then.budgets(seqs)

    def observe(self, seq: Sequence, record: Round) -> None:
        """Pass on the rounds of the other drafters; those of predictions say nothing about them."""
        if not self._is_predicted:
            self.then.observe(seq, record)

    def release(self, slots: Seq[int]) -> None:
        """Forget these slots."""
        self.then.release(slots)


def with_predictions(llm: LLM, drafter: Drafter | None, policy: DraftPolicy) -> tuple[LLM, PredictedOutput]:
    """A second `LLM` over the same model and cache that takes predictions, and the drafter to give them to.

    drafter, policy: what drafts after a prediction has ended. Errors of binding the drafter are passed on.
    """
    other, predicted = copy.copy(llm), PredictedOutput()
    members = drafter.members if isinstance(drafter, Choose) else () if drafter is None else (drafter,)
    first = PredictedFirst(predicted, policy)
    other.decoder = SpeculativeDecoder(llm.runner, Choose([predicted, *members]), llm.verifier, first)
    if isinstance(policy, CostModel):
        policy.measure(llm.runner.max_length)
    return other, predicted


def cut_to(params: SamplingParams, answer: RequestOutput) -> SamplingParams:
    """Sampling options under which the large model answers no longer than the given answer."""
    length = max(1, len(answer.token_ids))
    return replace(params, max_tokens=length, min_tokens=min(params.min_tokens, length), logprobs=None)


def confirms(own: RequestOutput, answer: RequestOutput) -> bool:
    """Whether the large model's own answer, made under `cut_to`, is the given one, which ended by itself."""
    return own.token_ids == answer.token_ids and own.finish_reason == "stop"


def check_exact(llm: LLM, role: str) -> None:
    """Raises `ConfigError` unless the model verifies exactly. role: "small" or "large"."""
    if not llm.verifier.exact:
        raise ConfigError(
            f"the {role} model must verify exactly, or no answer could be called its own",
            got=llm.verifier.name,
            expected="the default verifier, Coupled()",
            fix=f"make the {role} LLM without a verifier",
        )
