"""A small model answers alone where it may be trusted to; everything else is the large model's own answer.

small model answers within `short_limit` tokens
  ended, confidence >= threshold ──> its answer               lossy: may differ, for at most `max_disagreement` of
  otherwise: its answer is a draft ──> verified, corrected,   all prompts, with the confidence of the calibration
             and continued speculatively                      exact: token for token the large model's answer
"""

import secrets
import warnings
from collections.abc import Sequence as Seq
from dataclasses import replace
from os import PathLike
from typing import Literal, Self, TypeAlias, final

from ..core.interfaces import Drafter, DraftPolicy
from ..core.request import SamplingParams
from ..drafters import DraftModel
from ..drafters.draft_model import check_same_tokenizer
from ..errors import ConfigError, LossyNotAllowed
from ..hf.prompts import Prompt, as_list
from ..llm import LLM
from ..policy import CostModel
from .audit import AuditCounts, Auditor
from .calibration import Calibration, load_calibration, sampling_of
from .checker import Checker, check_exact
from .drift import DriftAlarm
from .handed import with_handed
from .identity import identity
from .outcome import CascadeOutput, CascadeStats, DriftWarning, Reason, ask_small, judge

WhenAlarmed: TypeAlias = Literal["verify", "warn"]


@final
class Cascade:
    """Two models of one tokenizer, text or vision, as one.

    calibration: of `paceline calibrate`, for these very models, or its file. max_disagreement, confidence: what is to
    be promised, from the same counts; None: what it was made for. The promise is about all prompts of the kind that was
    calibrated: the probability that the small model answers alone *and* says what the large one would not.
    drafter: goes on where the small answer is corrected or longer than its window; None: the small model itself.
    policy: how much that drafter drafts. audit_share: of all requests; audit_seed: of the draws that choose them, for
    tests; None: of the system's own. false_alarm: the chance that the drift alarm is ever raised while the promise
    holds. on_alarm: "verify" stops trusting the small model until `trust_again`, "warn" goes on.

    A second engine over the large model's weights audits in a thread of its own; `close`, or `with`, ends it.
    Raises `LossyNotAllowed`, `ConfigError` where the calibration cannot promise it, `IncompatibleModels`.
    """

    def __init__(
        self,
        small: LLM,
        large: LLM,
        calibration: Calibration | str | PathLike[str],
        *,
        max_disagreement: float | None = None,
        confidence: float | None = None,
        allow_lossy: bool = False,
        drafter: Drafter | None = None,
        policy: DraftPolicy | None = None,
        audit_share: float = 0.05,
        audit_seed: int | None = None,
        false_alarm: float = 0.01,
        queue_size: int = 64,
        on_alarm: WhenAlarmed = "verify",
    ):
        if not allow_lossy:
            raise LossyNotAllowed(
                "a cascade lets the small model answer alone, which may change the answer",
                fix="pass allow_lossy=True to accept that, or use DraftModel, which changes nothing",
            )
        if on_alarm not in ("verify", "warn"):
            raise ConfigError("unknown on_alarm", got=repr(on_alarm), expected="'verify' or 'warn'")
        check_exact(small, "small")
        check_exact(large, "large")
        check_same_tokenizer(large.loaded, small.loaded)
        made = calibration if isinstance(calibration, Calibration) else load_calibration(str(calibration))
        made.check_models(identity(small), identity(large))
        made.check_room(small.runner.max_length)
        self.calibration, self.choice = made, made.choose(max_disagreement, confidence)
        self.small, self.on_alarm = small, on_alarm
        self.large, self._handed = with_handed(large, drafter or DraftModel(small.loaded), policy or CostModel())
        alarm = DriftAlarm(self.choice.max_disagreement, false_alarm)
        self._auditor = Auditor(alarm, audit_share, queue_size, audit_seed)
        self._checker = Checker(large) if audit_share else None
        self._requests = self._alone = 0
        self._warned = False

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[CascadeOutput]:
        """Answer one prompt or many, as `LLM.generate` does; each result says who decided and how sure it was."""
        if self._auditor.is_closed:
            raise ConfigError("the cascade is closed", fix="make a new Cascade, or ask the large model itself")
        many = as_list(prompts)
        given = [params or SamplingParams()] * len(many) if isinstance(params, SamplingParams | None) else list(params)
        if len(given) != len(many):
            raise ConfigError("params and prompts differ in number", got=len(given), expected=len(many))
        if any(one.n != 1 for one in given):
            raise ConfigError("a cascade gives one answer to a prompt", got="n > 1", expected="n=1")
        each = [one if one.seed is not None else replace(one, seed=secrets.randbits(62)) for one in given]
        self._report()
        drawn = [self._auditor.draws() for _ in many]  # before anybody answers: chance alone decides
        asked = ask_small(self.small, many, each, self.calibration.short_limit)
        trusts = not (self.is_alarmed and self.on_alarm == "verify")
        verdicts = [
            judge(answer, self.choice, sampling_of(one) == self.calibration.sampling, trusts)
            for answer, one in zip(asked, each, strict=True)
        ]
        rest = [i for i, (reason, _) in enumerate(verdicts) if reason is not Reason.CONFIDENT]
        self._handed.give([() if (one := asked[i]) is None else one.token_ids for i in rest])
        answers = dict(zip(rest, self.large.generate([many[i] for i in rest], [each[i] for i in rest]), strict=True))
        results = []
        for i, (reason, sure) in enumerate(verdicts):
            output = CascadeOutput.of(answers.get(i), asked[i], reason, sure, self.choice, each[i].logprobs)
            is_chosen = drawn[i] and trusts and self._audit(many[i], each[i], output)
            results.append(replace(output, audited=is_chosen))
        self._requests += len(results)
        self._alone += sum(one.decided_by == "small" for one in results)
        return results

    @property
    def is_alarmed(self) -> bool:
        """Whether the audits have refuted the promise."""
        return self._auditor.alarm.raised

    def trust_again(self) -> None:
        """Lower the alarm and let the small model answer alone again, as after looking into it."""
        self._auditor.reset_alarm()
        self._warned = False

    def stats(self) -> CascadeStats:
        """Coverage, audits and the state of the alarm so far."""
        alarm = self._auditor.alarm
        return CascadeStats(
            self._requests, self._alone, self._auditor.counts(), alarm.raised, alarm.wealth, 1 / alarm.false_alarm
        )

    def finish_audits(self) -> AuditCounts:
        """Wait for the audits that are queued."""
        self._auditor.drain()
        self._report()
        return self._auditor.counts()

    def close(self) -> None:
        """Finish the audits and end their thread; the models stay usable."""
        self._auditor.close()
        self._report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _audit(self, prompt: Prompt, params: SamplingParams, output: CascadeOutput) -> bool:
        """Queue a request that was drawn, if it is of the kind that was calibrated."""
        if self._checker is None or output.reason is Reason.OTHER_SAMPLING:
            return False
        if output.decided_by == "large":
            return self._auditor.take(None)
        checker, answer = self._checker, output.token_ids
        return self._auditor.take(lambda: not checker.says(prompt, params, answer))

    def _report(self) -> None:
        """Tell on the caller's own thread what the worker met."""
        for told in self._auditor.new_errors():
            warnings.warn(f"an audit failed, so its answer was not checked: {told}", RuntimeWarning, stacklevel=3)
        if self.is_alarmed and not self._warned:
            self._warned = True
            counts = self._auditor.counts()
            then = "Every answer is verified from now on" if self.on_alarm == "verify" else "It goes on all the same"
            warnings.warn(
                f"more than {self.choice.max_disagreement:g} of the answers differ from the large model's "
                f"({counts.differed} in {counts.seen} audited requests). {then}; calibrate again on such prompts.",
                DriftWarning,
                stacklevel=3,
            )
