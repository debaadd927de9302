"""How much of what a drafter proposes stands: measured in the real decoding loop, kept with a head, compared later.

round        drafted depth 3    accepted 2    emitted 3 (two drafted, one of the target's own)
position     1: stood           2: stood      3: rejected
over rounds  per_position[i] = share of rounds in which position i + 1 stood
             mean acceptance length = emitted tokens / target passes, the target's own token counted (as in vLLM)
"""

import copy
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, cast

from ..core.interfaces import DraftBudget
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..llm import LLM, Prompt
from ..outputs import Completion
from ..policy import Fixed

Progress = Callable[[str, int, int], None]
"""progress(what, done, total)."""


@dataclass(frozen=True)
class AnswerCounts:
    """One answer. accepted: for each position from the first, the rounds in which a drafted token stood there."""

    tokens: int
    rounds: int
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Acceptance:
    """Counts of some answers, and the rates that follow from them."""

    answers: tuple[AnswerCounts, ...]

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
        """Emitted tokens per target pass, the target's own token counted: 1 where no draft ever stands."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of the rounds in which a drafted token stood at each position; never rises. [D]."""
        depth = max((len(answer.accepted) for answer in self.answers), default=0)
        return tuple(sum(self.accepted_at(position)) / max(self.num_rounds, 1) for position in range(depth))

    def accepted_at(self, position: int) -> list[int]:
        """By answer, the rounds in which position `position` + 1 stood."""
        return [a.accepted[position] if position < len(a.accepted) else 0 for a in self.answers]

    def first(self, count: int) -> "Acceptance":
        """Of the first answers only."""
        return replace(self, answers=self.answers[:count])

    def as_dict(self) -> dict[str, object]:
        """As JSON can hold it; the rates are for people, the counts are what `from_dict` reads."""
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "per_position": [round(rate, 4) for rate in self.per_position],
            "tokens": self.num_tokens,
            "rounds": self.num_rounds,
            "answers": [{"tokens": a.tokens, "rounds": a.rounds, "accepted": list(a.accepted)} for a in self.answers],
        }

    @classmethod
    def from_dict(cls, given: object) -> "Acceptance":
        """Read what `as_dict` wrote. Raises `ConfigError` for anything else, and for rates that are not its counts'."""
        try:
            whole = cast("dict[str, Any]", given)
            answers = [
                AnswerCounts(int(a["tokens"]), int(a["rounds"]), tuple(int(n) for n in a["accepted"]))
                for a in whole["answers"]
            ]
            made = cls(tuple(answers))
            told = float(whole["mean_acceptance_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("the recorded acceptance cannot be read", got=repr(error)) from error
        if not math.isclose(told, made.mean_acceptance_length, abs_tol=1e-3):
            raise ConfigError(
                "the recorded acceptance contradicts its own counts",
                got=f"mean acceptance length {told}",
                expected=f"{made.mean_acceptance_length:.4f}",
            )
        return made


def counts_of(answer: Completion) -> AnswerCounts:
    """Count the rounds of an answer, after the prompt was read."""
    stood = [record.num_accepted for record in answer.decoding]
    accepted = tuple(sum(n > position for n in stood) for position in range(max(stood, default=0)))
    return AnswerCounts(answer.num_decoded, len(answer.decoding), accepted)


def measure_acceptance(
    llm: LLM,
    prompts: Seq[Prompt],
    params: SamplingParams,
    budget: DraftBudget,
    progress: Progress = lambda what, done, total: None,
) -> Acceptance:
    """Answer the prompts with the drafter of `llm`, which drafts `budget` in every round; answer i has seed + i.

    With the same dtype, numerics and prompts the same counts come out again. Raises `ConfigError` without prompts,
    without a seed, or with more than one answer a prompt.
    """
    if not prompts:
        raise ConfigError("there is nothing to measure", got="no prompts")
    if params.n != 1 or params.seed is None:
        raise ConfigError("acceptance is measured on one reproducible answer a prompt", got=f"n={params.n}", fix="seed")
    engine = _with_fixed_budget(llm, budget)
    answers: list[AnswerCounts] = []
    for index, prompt in enumerate(prompts):  # one by one: neighbours in a batch may change the numerics of a row
        result = engine.generate([prompt], replace(params, seed=params.seed + index))[0]
        answers.append(counts_of(result.outputs[0]))
        progress("measuring acceptance", len(answers), len(prompts))
    return Acceptance(tuple(answers))


def _with_fixed_budget(llm: LLM, budget: DraftBudget) -> LLM:
    """The same engine with its drafter as it is bound, under a policy that always drafts as much."""
    engine, decoder = copy.copy(llm), copy.copy(llm.decoder)
    decoder.policy = Fixed(budget.depth, budget.nodes)
    decoder.policy.bind(decoder.drafter, llm.runner.pass_seconds)
    engine.decoder = decoder
    return engine


@dataclass(frozen=True)
class Difference:
    """A number that was measured, the one that was recorded, and how far apart they may be."""

    what: str
    measured: float
    recorded: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return abs(self.measured - self.recorded) <= self.allowed


def differences(measured: Acceptance, recorded: Acceptance, tolerance: float = 0.05) -> list[Difference]:
    """Hold the mean acceptance length and each position against the record of the same prompts.

    tolerance: relative for the mean, absolute for the rates. Two standard errors of the difference are allowed on top:
    other numerics write other answers here and there. They are estimated prompt by prompt, so that for identical
    answers they are zero.
    """
    if len(measured.answers) != len(recorded.answers):
        raise ConfigError(
            "the record is of other prompts", got=len(measured.answers), expected=f"{len(recorded.answers)} prompts"
        )
    rounds = [[answer.rounds for answer in side.answers] for side in (measured, recorded)]

    def compare(what: str, ours: list[int], theirs: list[int], allowed: float, relative: bool) -> Difference:
        values = [sum(counts) / max(sum(per), 1) for counts, per in zip((ours, theirs), rounds, strict=True)]
        spread = [_residuals(counts, per) for counts, per in zip((ours, theirs), rounds, strict=True)]
        error = _standard_error([a - b for a, b in zip(*spread, strict=True)])
        limit = allowed * (values[1] if relative else 1.0) + 2 * error
        return Difference(what, values[0], values[1], limit)

    tokens = [[answer.tokens for answer in side.answers] for side in (measured, recorded)]
    found = [compare("mean acceptance length", tokens[0], tokens[1], tolerance, relative=True)]
    for position in range(max(len(measured.per_position), len(recorded.per_position))):
        what = f"acceptance at position {position + 1}"
        found.append(
            compare(what, measured.accepted_at(position), recorded.accepted_at(position), tolerance, relative=False)
        )
    return found


def _residuals(counts: Seq[int], rounds: Seq[int]) -> list[float]:
    """What each answer adds to the deviation of the ratio sum(counts) / sum(rounds), linearised."""
    total = max(sum(rounds), 1)
    ratio = sum(counts) / total
    return [(count - ratio * n) * len(rounds) / total for count, n in zip(counts, rounds, strict=True)]


def _standard_error(values: Seq[float]) -> float:
    """Of the mean of these values; 0 where one value says nothing about it."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
