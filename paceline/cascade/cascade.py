"""A small model answers alone where it is confident; all other answers are the large model's own.

the small model answers within `short_limit` tokens
  ended, confidence >= threshold --> its answer           lossy: differs for at most `max_disagreement` of all prompts,
                                                                 with the calibrated confidence
  otherwise --> its answer is the first draft of the      exact: token for token the large model's answer
                large model, which verifies and continues it
"""

import random
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from os import PathLike
from typing import Annotated, Literal, final

from pydantic import Field

from ..core.interfaces import Drafter, DraftPolicy
from ..core.request import SEED_BITS, SamplingParams, TokenLogprob, params_of
from ..engine.output import RequestOutput
from ..errors import CacheFull, ConfigError, LossyNotAllowed
from ..llm import LLM
from ..methods.draft_model.drafter import DraftModel
from ..policy import CostModel
from ..schema import checked_call
from ..target.prompts import Prompt, as_list
from .audit import AuditCounts, DriftAlarm
from .bound import Share
from .calibration import Calibration, ChosenThreshold, ModelId, Signal, confidences, load_calibration, sampling_options
from .predicted import check_pair, confirms, cut_to, predicting, with_predictions


class DriftWarning(UserWarning):
    """The audits show that the guarantee no longer holds."""


class Reason(StrEnum):
    """Why the small model answered alone, or did not."""

    CONFIDENT = "confident"
    UNSURE = "unsure"  # its confidence was below the threshold
    LONG = "long"  # its answer did not end within `short_limit` tokens
    NO_ROOM = "no_room"  # the prompt does not fit its context
    ALARM = "alarm"  # the drift alarm is raised
    OTHER_SAMPLING = "other_sampling"  # not the sampling options that were calibrated


@dataclass(frozen=True)
class CascadeOutput:
    """One answer.

    decided_by: "small" for lossy answers, "large" for those that are exactly the large model's own.
    confidence: of the small answer, None where it did not end. It was compared with `threshold`, which guarantees
        `max_disagreement` with the statistical confidence `promised_with`.
    output: the answer.
    small: the small model's answer.
    audited: whether the large model checked this request.
    """

    decided_by: Literal["small", "large"]
    reason: Reason
    signal: Signal
    confidence: float | None
    threshold: float
    max_disagreement: float
    promised_with: float
    output: RequestOutput
    small: RequestOutput | None
    audited: bool = False

    @property
    def text(self) -> str:
        """Text of the answer."""
        return self.output.text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer."""
        return self.output.token_ids

    @property
    def lossless(self) -> bool:
        """Whether this is guaranteed to be the large model's answer."""
        return self.decided_by == "large"


@dataclass(frozen=True)
class CascadeStats:
    """Requests so far, how many the small model answered alone, and the results of the audits.

    evidence: against the guarantee; the alarm is raised where it reaches `alarm_at`.
    """

    requests: int
    alone: int
    audits: AuditCounts
    is_alarmed: bool
    evidence: float
    alarm_at: float

    @property
    def coverage(self) -> float:
        """Share that the small model answered alone; 0 without requests."""
        return self.alone / self.requests if self.requests else 0.0


@final
class Cascade:
    """A cascade of two text or vision-language models with the same tokenizer.

    calibration: the result of `paceline calibrate` for these models, or its file.
    max_disagreement, confidence: the bound to guarantee; None takes that of the calibration. It holds for all prompts
        of the calibrated kind together: it bounds the probability that the small model answers alone *and* differs from
        the large one.
    drafter: drafts after the small answer was corrected, or where it is too long; None takes the small model.
    policy: decides how much that drafter drafts.
    audit_share: the share of all requests that the large model checks, 0 to 1.
    audit_seed: the seed of the draws, for tests; None draws it at random.
    false_alarm: the probability that the drift alarm is ever raised while the guarantee holds.
    on_alarm: "verify" lets the large model verify every answer until `trust_again`, "warn" only warns.

    Raises `LossyNotAllowed`, `ConfigError` where the calibration cannot guarantee the bound, `IncompatibleModels`.
    """

    @checked_call
    def __init__(
        self,
        small: LLM,
        large: LLM,
        calibration: Calibration | str | PathLike[str],
        *,
        max_disagreement: Share | None = None,
        confidence: Share | None = None,
        allow_lossy: bool = False,
        drafter: Drafter | None = None,
        policy: DraftPolicy | None = None,
        audit_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05,
        audit_seed: int | None = None,
        false_alarm: Share = 0.01,
        on_alarm: Literal["verify", "warn"] = "verify",
    ):
        if not allow_lossy:
            raise LossyNotAllowed(
                "a cascade lets the small model answer alone, which may change the answer",
                fix="pass allow_lossy=True to accept that, or use DraftModel, which is exact",
            )
        check_pair(small, large)
        calibration = calibration if isinstance(calibration, Calibration) else load_calibration(str(calibration))
        calibration.check_models(ModelId.of(small), ModelId.of(large))
        calibration.check_room(small.runner.max_length)
        self.calibration, self.choice = calibration, calibration.choose(max_disagreement, confidence)
        self.small, self.on_alarm = small, on_alarm
        drafter = drafter or DraftModel(small.loaded)
        self.large = with_predictions(large, drafter, policy or CostModel())
        self._alarm = DriftAlarm(self.choice.max_disagreement, false_alarm)
        self._audit_share, self._draws = audit_share, random.Random(audit_seed)
        self._requests = self._alone = self._checked = 0

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[CascadeOutput]:
        """Answer one prompt or many, as `LLM.generate` does; each result says which model decided, and why."""
        many = as_list(prompts)
        requested = params_of(params, len(many))
        if any(options.n != 1 for options in requested):
            raise ConfigError("a cascade gives one answer to a prompt", got="n > 1", expected="n=1")
        if any(options.adapter for options in requested):
            fix = "merge the adapter, and calibrate with that model"
            raise ConfigError("a calibration holds for the models themselves", got="a request with an adapter", fix=fix)
        each = [
            options if options.seed is not None else replace(options, seed=secrets.randbits(SEED_BITS))
            for options in requested
        ]
        drawn = [
            self._draws.random() < self._audit_share for _ in many
        ]  # before the models answer, so that the draw is independent
        answers = ask_small(self.small, many, each, self.calibration.short_limit)
        sampling, trusts = self.calibration.sampling, not (self.is_alarmed and self.on_alarm == "verify")
        verdicts = [
            (Reason.NO_ROOM, None)
            if answer is None
            else decide(
                answer.finish_reason, answer.logprobs, self.choice, sampling_options(options) == sampling, trusts
            )
            for answer, options in zip(answers, each, strict=True)
        ]
        audited = [
            is_drawn and trusts and reason is not Reason.OTHER_SAMPLING
            for is_drawn, (reason, _) in zip(drawn, verdicts, strict=True)
        ]
        alone = {i: answers[i] for i, (reason, _) in enumerate(verdicts) if reason is Reason.CONFIDENT}
        verified = [i for i in range(len(many)) if i not in alone or audited[i]]
        limits = [each[i] if (small := alone.get(i)) is None else cut_to(each[i], small) for i in verified]
        predicted = [predicting(options, answers[i], self.large) for i, options in zip(verified, limits, strict=True)]
        large = dict(zip(verified, self.large.generate([many[i] for i in verified], predicted), strict=True))
        results, choice = [], self.choice
        for i, (reason, confidence) in enumerate(verdicts):
            numbers = choice.signal, confidence, choice.threshold, choice.max_disagreement, choice.confidence
            small = alone.get(i)
            output = large[i] if small is None else _declared_lossy(small, each[i].logprobs)
            decided_by = "large" if small is None else "small"
            results.append(CascadeOutput(decided_by, reason, *numbers, output, answers[i], audited[i]))
            if audited[i]:
                self._audit(small is not None, small is not None and not confirms(large[i], small))
        self._requests += len(many)
        self._alone += len(alone)
        return results

    @property
    def is_alarmed(self) -> bool:
        """Whether the drift alarm is raised."""
        return self._alarm.raised

    def trust_again(self) -> None:
        """Lower the alarm and let the small model answer alone again, once the cause is known."""
        self._alarm.reset()
        self._checked = 0

    def stats(self) -> CascadeStats:
        """Coverage, audits and the state of the alarm so far."""
        alarm = self._alarm
        audits = AuditCounts(alarm.seen, self._checked, alarm.differed)
        return CascadeStats(self._requests, self._alone, audits, alarm.raised, alarm.wealth, 1 / alarm.false_alarm)

    def _audit(self, checked: bool, differs: bool) -> None:
        """Count an audited request; warn if it raises the alarm."""
        self._checked += checked
        before, alarm = self.is_alarmed, self._alarm
        if alarm.see(differs) and not before:
            then = "Every answer is verified from now on" if self.on_alarm == "verify" else "It goes on all the same"
            warnings.warn(
                f"more than {self.choice.max_disagreement:g} of the answers differ from the large model's "
                f"({alarm.differed} in {alarm.seen} audited requests). {then}; calibrate again on such prompts.",
                DriftWarning,
                stacklevel=3,
            )


def ask_small(
    small: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], limit: int
) -> list[RequestOutput | None]:
    """The small model's answers of up to `limit` tokens, with log-probabilities; None where a prompt is too long."""
    try:
        return list(small.generate(list(prompts), [_within(options, limit) for options in params]))
    except CacheFull:  # some prompt is too long for it: try them one at a time
        if len(prompts) == 1:
            return [None]
    return [ask_small(small, [p], [s], limit)[0] for p, s in zip(prompts, params, strict=True)]


def _within(params: SamplingParams, limit: int) -> SamplingParams:
    limit = min(params.most_tokens, limit)
    if params.min_tokens > limit:  # the answer may not end within the limit, so nothing may end it there
        params = replace(params, stop=(), stop_token_ids=(), ignore_eos=True)
    min_tokens, logprobs = min(params.min_tokens, limit), -1 if params.logprobs == -1 else max(2, params.logprobs or 0)
    return replace(params, max_tokens=limit, min_tokens=min_tokens, logprobs=logprobs)


def decide(
    finish_reason: str | None,
    logprobs: Sequence[TokenLogprob] | None,
    choice: ChosenThreshold,
    is_calibrated: bool,
    trusts: bool,
) -> tuple[Reason, float | None]:
    """Why which model answers, and the confidence where the small answer ended by itself within the limit.

    logprobs: of each token of the small answer, with the top two.
    """
    confidence = confidences(logprobs or [])[choice.signal] if finish_reason == "stop" else None
    if not is_calibrated:
        return Reason.OTHER_SAMPLING, confidence
    if confidence is None:
        return Reason.LONG, None
    if confidence < choice.threshold:
        return Reason.UNSURE, confidence
    return (Reason.CONFIDENT if trusts else Reason.ALARM), confidence


def _declared_lossy(answer: RequestOutput, logprobs: int | None) -> RequestOutput:
    """A small answer for the user: marked as lossy, with the requested number of log-probabilities."""
    (completion,) = answer.outputs
    kept = None
    if logprobs is not None and completion.logprobs is not None:
        most = len(completion.logprobs[0].top) if logprobs < 0 else logprobs
        kept = [replace(logprob, top=dict(list(logprob.top.items())[:most])) for logprob in completion.logprobs]
    return replace(answer, outputs=[replace(completion, logprobs=kept, lossless=False, exact=False)])
