"""The small model's answer as the large model's first draft, verified in one pass; then another drafter continues.

See `methods.prediction`. A wrong prediction changes no token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import final

from ..core.interfaces import DraftBudget, Drafter, DraftPolicy, TargetExperts
from ..core.request import SamplingParams, TokenSequence
from ..core.round import Round
from ..engine.contract import bind_policy
from ..engine.output import RequestOutput
from ..errors import ConfigError
from ..llm import LLM
from ..methods.choose import Choose
from ..methods.draft_model.drafter import check_same_tokenizer
from ..methods.prediction import PredictedOutput
from ..policy import CostModel


@final
class PredictedFirst(DraftPolicy):
    """Draft the whole rest of a prediction at once while the answer agrees with it; then follow another policy.

    While some row of a batch has such a rest, the rows without one draft nothing. `PredictedOutput` is member 0 of a
    `Choose`.
    """

    def __init__(self, then: DraftPolicy):
        self.then, self._is_predicted = then, False

    def bind(
        self, drafter: Drafter, pass_seconds: Callable[[int], float], pads_trees: bool = True,
        experts: TargetExperts | None = None,
    ) -> None:  # fmt: skip
        bind_policy(self.then, drafter, pass_seconds, pads_trees, experts)

    def budgets(self, seqs: Sequence[TokenSequence]) -> list[DraftBudget]:
        """A budget for each row; the loop limits it to the tokens that may still be emitted."""
        rests = [_rest(seq) for seq in seqs]
        self._is_predicted = any(rests)
        return [DraftBudget(n, n) for n in rests] if self._is_predicted else self.then.budgets(seqs)

    def observe(self, seq: TokenSequence, record: Round) -> None:
        """Pass on the rounds of the other policy only: predictions are not its drafts."""
        if not self._is_predicted:
            self.then.observe(seq, record)

    def release(self, slots: Sequence[int]) -> None:
        self.then.release(slots)


def _rest(seq: TokenSequence) -> int:
    """How many tokens are left of the prediction; 0 where the answer differs from it."""
    begin = seq.num_output
    return len(seq.prediction) - begin if seq.prediction[:begin] == tuple(seq.output_ids) else 0


def with_predictions(llm: LLM, drafter: Drafter | None, policy: DraftPolicy) -> LLM:
    """A second `LLM` over the same model and cache that accepts predictions, see `predicting`.

    drafter, policy: for drafts after the end of a prediction.
    """
    members = drafter.members if isinstance(drafter, Choose) else () if drafter is None else (drafter,)
    other = llm.using(drafter=Choose([PredictedOutput(), *members]), policy=PredictedFirst(policy))
    if isinstance(policy, CostModel):
        policy.measure(llm.runner.max_length)
    return other


def predicting(params: SamplingParams, answer: RequestOutput | None, llm: LLM) -> SamplingParams:
    """Sampling options with an answer as the prediction, up to the first token that this model lacks."""
    ids = [] if answer is None else answer.token_ids
    size, banned = llm.loaded.vocab_size, llm.runner.banned_token_ids
    known = list(takewhile(lambda token: token < size and token not in banned, ids))
    return replace(params, extra_args={**(params.extra_args or {}), "prediction": known})


def cut_to(params: SamplingParams, answer: RequestOutput) -> SamplingParams:
    """Sampling options under which the large model answers no longer than the given answer."""
    length = max(1, len(answer.token_ids))
    return replace(params, max_tokens=length, min_tokens=min(params.min_tokens, length), logprobs=None)


def confirms(own: RequestOutput, answer: RequestOutput) -> bool:
    """Whether the large model's own answer, made under `cut_to`, is the given one, which ended by itself."""
    return own.token_ids == answer.token_ids and own.finish_reason == "stop"


def check_pair(small: LLM, large: LLM) -> None:
    """Raises `ConfigError` unless both verifiers are exact, `IncompatibleModels` unless the tokenizers are equal."""
    for role, llm in (("small", small), ("large", large)):
        if not llm.verifier.exact:
            raise ConfigError(
                f"the {role} model needs an exact verifier",
                got=llm.verifier.name,
                expected="the default verifier, Coupled()",
                fix=f"make the {role} LLM without a verifier",
            )
    check_same_tokenizer(large.loaded, small.loaded)
