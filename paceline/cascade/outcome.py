"""What a cascade gives: the answer, who decided, and why."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from ..core.request import SamplingParams, TokenLogprob
from ..errors import CacheFull
from ..hf.prompts import Prompt
from ..llm import LLM
from ..outputs import RequestOutput
from .audit import AuditCounts
from .calibration import Choice
from .confidence import Signal, confidences


class DriftWarning(UserWarning):
    """The audits have refuted the promise."""


class Reason(StrEnum):
    """Why the small model answered alone, or did not."""

    CONFIDENT = "confident"
    UNSURE = "unsure"  # its confidence was below the threshold
    LONG = "long"  # its answer did not end within the window
    NO_ROOM = "no_room"  # the prompt fills its context
    ALARM = "alarm"  # the audits have refuted the promise
    OTHER_SAMPLING = "other_sampling"  # not the sampling options that were calibrated


@dataclass(frozen=True)
class CascadeOutput:
    """One answer.

    decided_by: "small" answers are lossy; "large" ones are exactly the large model's own. confidence: of the small
    answer, None where it did not end. It was held against `threshold`, which promises `max_disagreement` with
    `promised_with`. output: of the one who decided. small: what the small model said. audited: whether this request is
    checked in the background.
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

    @classmethod
    def of(
        cls,
        large: RequestOutput | None,
        small: RequestOutput | None,
        reason: Reason,
        sure: float | None,
        choice: Choice,
        logprobs: int | None,
    ) -> "CascadeOutput":
        """The large answer where there is one. logprobs: how many the user asked for."""
        numbers = (choice.signal, sure, choice.threshold, choice.max_disagreement, choice.confidence)
        if large is not None:
            return cls("large", reason, *numbers, large, small)
        assert small is not None
        return cls("small", reason, *numbers, _as_asked(small, logprobs), small)

    @property
    def text(self) -> str:
        """Text of the answer."""
        return self.output.text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the answer."""
        return self.output.token_ids

    @property
    def prompt_token_ids(self) -> list[int]:
        """Of the model that decided."""
        return self.output.prompt_token_ids

    @property
    def lossless(self) -> bool:
        """Whether this is the large model's answer for certain."""
        return self.decided_by == "large"


@dataclass(frozen=True)
class CascadeStats:
    """How it goes: requests, how many the small model answered alone, and what the audits found.

    evidence: against the promise; the alarm is raised where it reaches `alarm_at`.
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


def ask_small(small: LLM, prompts: Seq[Prompt], params: Seq[SamplingParams], limit: int) -> list[RequestOutput | None]:
    """The small model's answers up to `limit` tokens, with the two likeliest of each; None where a prompt fills it."""
    short = [_short(one, limit) for one in params]
    try:
        return list(small.generate(list(prompts), short))
    except CacheFull:  # some prompt is too long for it: one by one, to find out which
        if len(prompts) == 1:
            return [None]
    return [ask_small(small, [p], [s], limit)[0] for p, s in zip(prompts, params, strict=True)]


def _short(params: SamplingParams, limit: int) -> SamplingParams:
    most = min(params.max_tokens, limit)
    if params.min_tokens > most:  # it may not end within the window, so nothing may end it there
        params = replace(params, stop=(), stop_token_ids=(), ignore_eos=True)
    return replace(
        params, max_tokens=most, min_tokens=min(params.min_tokens, most), logprobs=max(2, params.logprobs or 0)
    )


def has_ended(answer: RequestOutput | None) -> bool:
    """Whether it came to its end by itself, within the window."""
    return answer is not None and answer.finish_reason == "stop"


def judge(
    answer: RequestOutput | None, choice: Choice, is_calibrated: bool, trusts: bool
) -> tuple[Reason, float | None]:
    """Who answers, and the confidence where the small answer ended."""
    if answer is None:
        return Reason.NO_ROOM, None
    sure = confidences(answer.logprobs or [])[choice.signal] if has_ended(answer) else None
    if not is_calibrated:
        return Reason.OTHER_SAMPLING, sure
    if sure is None:
        return Reason.LONG, None
    if sure < choice.threshold:
        return Reason.UNSURE, sure
    return (Reason.CONFIDENT if trusts else Reason.ALARM), sure


def _as_asked(answer: RequestOutput, logprobs: int | None) -> RequestOutput:
    """A small answer as the user gets it: declared lossy, with as many log-probabilities as asked for."""
    (one,) = answer.outputs
    kept = None
    if logprobs is not None and one.logprobs is not None:
        kept = [TokenLogprob(t.token_id, t.logprob, dict(list(t.top.items())[:logprobs])) for t in one.logprobs]
    return replace(answer, outputs=[replace(one, logprobs=kept, lossless=False, exact=False)])
