"""Recorded measurements of a drafter's acceptance, which can be repeated and compared.

`training.json` of a head has a list of them under "acceptance"; `paceline models` shows the first:

    {"name": "built-in prompts",
     "prompts": {"source": "built_in", "count": 8, "sha256": "..."},
     "params": {"temperature": 0.0, "max_tokens": 128, "seed": 0},
     "budget": {"depth": 5, "nodes": 24},
     "drafter": {"tree": "dynamic", "top_k": 8},
     "setting": {"dtype": "float32", "numerics": "fast", "device": "cpu", "greeting as tokens": "..."},
     "result": {"mean_acceptance_length": ..., "per_position": [...], "answers": [{"tokens", "rounds", "accepted"}]}}

source   built_in   the prompts of `paceline.measure.prompts`
         texts      user messages, in "texts"
         file       a file of which only the hash is recorded; it must be given to repeat the measurement
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator

from ..config import SpecConfig, parse
from ..core.interfaces import DraftBudget
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..llm import LLM, Prompt
from ..methods.spec import of_head_alone
from ..policy import Fixed
from ..schema import Many, checked, validate
from ..system.files import Progress, silent
from ..system.provenance import hash_prompts
from .prompts import EXAMPLES, user_prompt

PROMPT = "greeting as tokens"
"""The setting that tells the tokenizer and the chat template: a hash of the tokens of one message."""
_GREETING = "Hello, who are you?"
Source: TypeAlias = Literal["built_in", "texts", "file"]


@checked
class AnswerCounts:
    """One answer. accepted: for each position from the first, the rounds in which a drafted token was accepted."""

    tokens: int
    rounds: int
    accepted: Many[int]


@checked
class AcceptanceCounts:
    """Counts of some answers, and the rates computed from them."""

    answers: Many[AnswerCounts]

    @property
    def num_tokens(self) -> int:
        """Emitted tokens."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def num_rounds(self) -> int:
        """Target passes."""
        return sum(answer.rounds for answer in self.answers)

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per target pass, the target's own token counted: 1 where no draft is ever accepted."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of the rounds in which a drafted token was accepted at each position; never rises. [D]."""
        depth = max((len(answer.accepted) for answer in self.answers), default=0)
        return tuple(sum(self.accepted_at(position)) / max(self.num_rounds, 1) for position in range(depth))

    def accepted_at(self, position: int) -> list[int]:
        """By answer, the rounds in which position `position` + 1 was accepted."""
        return [a.accepted[position] if position < len(a.accepted) else 0 for a in self.answers]

    def first(self, count: int) -> "AcceptanceCounts":
        return replace(self, answers=self.answers[:count])

    def as_dict(self) -> dict[str, object]:
        """For JSON; the rates are for readers, `from_dict` reads the counts."""
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "per_position": [round(rate, 4) for rate in self.per_position],
            "tokens": self.num_tokens,
            "rounds": self.num_rounds,
            **asdict(self),
        }

    @classmethod
    def from_dict(cls, record: object) -> "AcceptanceCounts":
        """Read the result of `as_dict`. Raises `ConfigError` for anything else, and for rates that contradict it."""
        if isinstance(record, cls):
            return record
        subject = "the recorded acceptance"
        record = validate(dict[str, object], record, subject)
        counts = validate(cls, {"answers": record.get("answers")}, subject)
        rate = validate(float, record.get("mean_acceptance_length"), subject)
        if not math.isclose(rate, counts.mean_acceptance_length, abs_tol=1e-3):
            raise ConfigError(
                f"{subject} contradicts its own counts",
                got=f"mean acceptance length {rate}",
                expected=f"{counts.mean_acceptance_length:.4f}",
            )
        return counts


def measure_acceptance(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, budget: DraftBudget, progress: Progress = silent
) -> AcceptanceCounts:
    """Answer the prompts with the drafter of `llm`, which drafts `budget` in every round; answer i has seed + i.

    With the same dtype, numerics and prompts the counts are reproducible. Raises `ConfigError` without prompts, without
    a seed, or for several answers per prompt.
    """
    if not prompts:
        raise ConfigError("there is nothing to measure", got="no prompts")
    if params.n != 1 or params.seed is None:
        raise ConfigError(
            "acceptance is measured on one reproducible answer per prompt",
            got=f"n={params.n}, seed={params.seed}", expected="n=1 and a seed",
        )  # fmt: skip
    engine = llm.using(policy=Fixed(budget.depth, budget.nodes))
    answers: list[AnswerCounts] = []
    progress("measuring acceptance", 0, len(prompts))
    for index, prompt in enumerate(prompts):  # one at a time: other rows of a batch may change the numerics
        answer = engine.generate([prompt], replace(params, seed=params.seed + index))[0].outputs[0]
        kept = [record.num_accepted for record in answer.decoding]
        accepted = tuple(sum(n > position for n in kept) for position in range(max(kept, default=0)))
        answers.append(AnswerCounts(answer.num_decoded, len(kept), accepted))
        progress("measuring acceptance", len(answers), len(prompts))
    return AcceptanceCounts(tuple(answers))


@dataclass(frozen=True)
class Difference:
    """A measured and a recorded number, and the allowed difference."""

    what: str
    measured: float
    recorded: float
    allowed: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.recorded) <= self.allowed


def differences(measured: AcceptanceCounts, recorded: AcceptanceCounts, tolerance: float = 0.05) -> list[Difference]:
    """Compare the mean acceptance length and each position with the record of the same prompts.

    tolerance: relative for the mean, absolute for the rates. Two standard errors of the difference are allowed in
    addition, since other numerics change some answers. They are estimated prompt by prompt, and zero for identical
    answers.
    """
    if len(measured.answers) != len(recorded.answers):
        raise ConfigError(
            "the record has another number of prompts",
            got=len(measured.answers),
            expected=f"{len(recorded.answers)} prompts",
        )
    sides, num_answers = (measured, recorded), len(measured.answers)
    rounds = np.array([[answer.rounds for answer in side.answers] for side in sides])  # [2, answers]
    totals = rounds.sum(1, keepdims=True).clip(min=1)

    def compare(what: str, counts: list[list[int]], is_relative: bool = False) -> Difference:
        ratios = np.sum(counts, axis=1, keepdims=True) / totals
        # What each answer adds to the deviation of the ratio, linearised.
        ours, others = (np.array(counts) - ratios * rounds) * num_answers / totals
        error = (ours - others).std(ddof=1) / math.sqrt(num_answers) if num_answers > 1 else 0.0
        now, then = ratios.flatten().tolist()
        return Difference(what, now, then, tolerance * (then if is_relative else 1.0) + 2 * float(error))

    tokens = [[answer.tokens for answer in side.answers] for side in sides]
    depth = max(len(side.per_position) for side in sides)
    return [
        compare("mean acceptance length", tokens, is_relative=True),
        *(compare(f"acceptance at position {d + 1}", [side.accepted_at(d) for side in sides]) for d in range(depth)),
    ]


@checked
class TrialPrompts:
    """The prompts of a trial, see the module's docstring. sha256: over all of them."""

    source: Source
    count: int
    sha256: str
    texts: Many[str] | None = None


@checked
class Trial:
    """One recorded measurement. drafter: JSON keys besides method and model. setting: dtype, numerics and device."""

    name: str
    prompts: TrialPrompts
    params: SamplingParams
    budget: DraftBudget
    drafter: dict[str, object]
    setting: dict[str, object]
    result: Annotated[AcceptanceCounts, BeforeValidator(AcceptanceCounts.from_dict)]

    def __post_init__(self) -> None:
        if self.prompts.count != len(self.result.answers):
            raise ConfigError(
                f"the record of {self.name!r} is incomplete",
                got=f"{len(self.result.answers)} answers",
                expected=f"{self.prompts.count}, one per prompt",
            )

    def as_dict(self) -> dict[str, object]:
        default, params = asdict(SamplingParams()), asdict(self.params)
        always = ("temperature", "max_tokens", "seed")
        return {
            **asdict(self),
            "prompts": {key: value for key, value in asdict(self.prompts).items() if value is not None},
            "params": {key: value for key, value in params.items() if key in always or value != default[key]},
            "budget": {"depth": self.budget.depth, "nodes": self.budget.nodes},
            "result": self.result.as_dict(),
        }

    @property
    def can_run(self) -> bool:
        return self.prompts.source != "file"

    def config(self, method: str, head: str) -> SpecConfig:
        """The configuration of the trial, with this head. Raises `ConfigError` for an invalid record."""
        return config_of(method, head, self.budget, self.drafter)

    def texts(self, file_texts: Sequence[str] | None = None) -> list[str]:
        """The prompts of the trial. file_texts: those of a file. Raises `ConfigError` if they are others."""
        recorded = self.prompts
        if file_texts is None and not self.can_run:
            raise ConfigError(f"the prompts of {self.name!r} are not part of the head", fix="give them with --prompts")
        texts = list(file_texts or recorded.texts or [example.prompt for example in EXAMPLES])[: recorded.count]
        if hash_prompts(texts) != recorded.sha256:
            raise ConfigError(
                f"these are not the prompts of {self.name!r}",
                got=f"{len(texts)} prompts, sha256 {hash_prompts(texts)[:12]}",
                expected=f"{recorded.count} prompts, sha256 {recorded.sha256[:12]}",
                fix="use the Paceline version that recorded it" if recorded.source == "built_in" else None,
            )
        return texts


def run_trial(
    llm: LLM,
    params: SamplingParams,
    budget: DraftBudget,
    drafter: dict[str, object],
    *,
    name: str = "built-in prompts",
    source: Source = "built_in",
    texts: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Trial:
    """Measure the drafter of `llm`, for training.json.

    drafter: its JSON keys besides method and model. texts: the prompts, unless they are the built-in ones.
    """
    texts = [example.prompt for example in EXAMPLES] if texts is None else list(texts)
    result = measure_acceptance(llm, [user_prompt(llm.loaded, text) for text in texts], params, budget, progress)
    prompts = TrialPrompts(source, len(texts), hash_prompts(texts), tuple(texts) if source == "texts" else None)
    return Trial(name, prompts, params, budget, drafter, _setting_of(llm), result)


def config_of(method: str, head: str, budget: DraftBudget, drafter: Mapping[str, object]) -> SpecConfig:
    """The configuration of a measurement. drafter: its JSON keys besides method and model."""
    options: dict[str, object] = {"method": method, "model": head, **of_head_alone(method), **drafter}
    options |= {"policy": "fixed", "num_speculative_tokens": budget.depth}
    if budget.nodes != budget.depth:
        options["num_draft_nodes"] = budget.nodes
    return parse(options)


@dataclass(frozen=True)
class TrialCheck:
    """A trial repeated on its first prompts.

    changed: settings that differ from the recorded ones, as (what, now, then), which explain small differences.
    """

    trial: Trial
    measured: AcceptanceCounts
    recorded: AcceptanceCounts
    differences: list[Difference]
    changed: list[tuple[str, str, str]]

    @property
    def passed(self) -> bool:
        return all(difference.holds for difference in self.differences)

    @property
    def is_identical(self) -> bool:
        return self.measured == self.recorded


def check_trial(
    llm: LLM,
    trial: Trial,
    num_prompts: int | None = None,
    texts: Sequence[str] | None = None,
    tolerance: float = 0.05,
    progress: Progress = silent,
) -> TrialCheck:
    """Repeat a trial with `llm`, whose drafter must be the trial's, and compare it with its record."""
    prompts = [user_prompt(llm.loaded, text) for text in trial.texts(texts)[:num_prompts]]
    measured = measure_acceptance(llm, prompts, trial.params, trial.budget, progress)
    recorded, now = trial.result.first(len(prompts)), _setting_of(llm)
    changed = [(key, str(now.get(key)), str(then)) for key, then in trial.setting.items() if now.get(key) != then]
    return TrialCheck(trial, measured, recorded, differences(measured, recorded, tolerance), changed)


def trials_of(record: Mapping[str, object]) -> list[Trial]:
    """The trials of a training.json. Raises `ConfigError` for an entry that cannot be read."""
    rows = validate(list[object], record.get("acceptance", []), '"acceptance" in training.json')
    return [validate(Trial, row, "an entry of the recorded acceptance") for row in rows]


def _setting_of(llm: LLM) -> dict[str, object]:
    """Settings that may change answers, and so the counts."""
    loaded = llm.loaded
    dtype = str(loaded.dtype).removeprefix("torch.")
    text = ",".join(map(str, llm.encode(user_prompt(loaded, _GREETING))))
    prompt = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {"dtype": dtype, "numerics": llm.numerics, "device": loaded.device.type, PROMPT: prompt}
