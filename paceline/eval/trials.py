"""Recorded measurements of a head: everything that is needed to make them again, and the numbers that came out.

`training.json` holds them under "acceptance", a list, the first being the one that is quoted:

    {"name": "built-in prompts",
     "prompts": {"source": "built_in", "count": 8, "sha256": "..."},
     "params": {"temperature": 0.0, "max_tokens": 128, "seed": 0},
     "budget": {"depth": 5, "nodes": 24},
     "drafter": {"tree": "dynamic", "top_k": 8},
     "setting": {"dtype": "float32", "numerics": "fast", "device": "cpu"},
     "result": {"mean_acceptance_length": ..., "per_position": [...], "answers": [{"tokens", "rounds", "accepted"}]}}

source   built_in   the prompts of `paceline.eval.examples`, which every installation has
         texts      "texts" holds them here, as user messages
         file       a file that is not here; only its hash is known, so that it must be given to measure again
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, cast

from ..core.interfaces import DraftBudget
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..llm import LLM, Prompt
from ..spec_config import SpecConfig, parse
from ..system.provenance import hash_prompts
from .acceptance import Acceptance, Difference, Progress, differences, measure_acceptance
from .examples import EXAMPLES

Source: TypeAlias = Literal["built_in", "texts", "file"]
SOURCES = ("built_in", "texts", "file")


@dataclass(frozen=True)
class Trial:
    """One recorded measurement. drafter: keys of `spec_config` beside method and model. setting: where it was made."""

    name: str
    source: Source
    sha256: str
    count: int
    params: SamplingParams
    budget: DraftBudget
    drafter: Mapping[str, object]
    setting: Mapping[str, object]
    result: Acceptance
    texts: tuple[str, ...] | None = None

    def as_dict(self) -> dict[str, object]:
        """The entry of training.json."""
        prompts: dict[str, object] = {"source": self.source, "count": self.count, "sha256": self.sha256}
        if self.source == "texts" and self.texts is not None:
            prompts["texts"] = list(self.texts)
        return {
            "name": self.name,
            "prompts": prompts,
            "params": _params_to_json(self.params),
            "budget": {"depth": self.budget.depth, "nodes": self.budget.nodes},
            "drafter": dict(self.drafter),
            "setting": dict(self.setting),
            "result": self.result.as_dict(),
        }

    @property
    def can_run(self) -> bool:
        """Whether its prompts are here."""
        return self.source != "file"

    def config(self, method: str, head: str) -> SpecConfig:
        """How to draft as it was drafted, with this head. Raises `ConfigError` for a record that makes no sense."""
        given: dict[str, object] = {"method": method, "model": head, **self.drafter, "policy": "fixed"}
        given["num_speculative_tokens"] = self.budget.depth
        if self.budget.nodes != self.budget.depth:
            given["num_draft_nodes"] = self.budget.nodes
        return parse(given)

    def prompts(self, texts: Seq[str] | None = None) -> list[str]:
        """The very prompts it was made with. texts: those of a file. Raises `ConfigError` where they are others."""
        found = list(texts if texts is not None else self.texts or [example.prompt for example in EXAMPLES])
        found = found[: self.count]
        if texts is None and self.source == "file":
            raise ConfigError(f"the prompts of {self.name!r} are not part of the head", fix="give them with --prompts")
        if hash_prompts(found) != self.sha256:
            raise ConfigError(
                f"these are not the prompts of {self.name!r}",
                got=f"{len(found)} prompts, sha256 {hash_prompts(found)[:12]}",
                expected=f"{self.count} prompts, sha256 {self.sha256[:12]}",
                fix="use the Paceline version that recorded it" if self.source == "built_in" else None,
            )
        return found


def run_trial(
    llm: LLM,
    params: SamplingParams,
    budget: DraftBudget,
    drafter: Mapping[str, object],
    *,
    name: str = "built-in prompts",
    source: Source = "built_in",
    texts: Seq[str] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Trial:
    """Measure the drafter of `llm` and describe how, for training.json.

    drafter: its keys of `spec_config` beside method and model. texts: the prompts, unless they are the built-in ones.
    """
    found = [example.prompt for example in EXAMPLES] if texts is None else list(texts)
    result = measure_acceptance(llm, [chat_of(llm, text) for text in found], params, budget, progress)
    kept = tuple(found) if source == "texts" else None
    sha256 = hash_prompts(found)
    return Trial(name, source, sha256, len(found), params, budget, drafter, setting_of(llm), result, kept)


@dataclass(frozen=True)
class TrialCheck:
    """A trial made again on its first prompts.

    changed: settings that differ from the recorded ones, as (what, now, then): they explain small differences.
    """

    trial: Trial
    measured: Acceptance
    recorded: Acceptance
    differences: list[Difference]
    changed: list[tuple[str, str, str]]

    @property
    def passed(self) -> bool:
        """Whether every number agrees with its record."""
        return all(difference.holds for difference in self.differences)

    @property
    def is_identical(self) -> bool:
        """Whether every count is that of the record."""
        return self.measured == self.recorded


def check_trial(
    llm: LLM,
    trial: Trial,
    num_prompts: int | None = None,
    texts: Seq[str] | None = None,
    tolerance: float = 0.05,
    progress: Progress = lambda what, done, total: None,
) -> TrialCheck:
    """Make a trial again with `llm`, whose drafter must be the trial's, and hold it against its record."""
    found = trial.prompts(texts)[:num_prompts]
    measured = measure_acceptance(llm, [chat_of(llm, text) for text in found], trial.params, trial.budget, progress)
    recorded = trial.result.first(len(found))
    now = setting_of(llm)
    told = [(key, str(now.get(key)), str(then)) for key, then in trial.setting.items() if now.get(key) != then]
    return TrialCheck(trial, measured, recorded, differences(measured, recorded, tolerance), told)


def trials_of(record: Mapping[str, object]) -> list[Trial]:
    """The trials of a training.json. Raises `ConfigError` for an entry that cannot be read."""
    rows = record.get("acceptance", [])
    if not isinstance(rows, list):
        raise ConfigError('"acceptance" in training.json is not a list', got=type(rows).__name__)
    return [_trial_of(row) for row in cast("list[Any]", rows)]


def _trial_of(row: Any) -> Trial:
    try:
        prompts, budget = row["prompts"], row["budget"]
        if prompts["source"] not in SOURCES:
            raise ConfigError("unknown source of prompts", got=prompts["source"], expected=", ".join(SOURCES))
        trial = Trial(
            str(row["name"]),
            prompts["source"],
            str(prompts["sha256"]),
            int(prompts["count"]),
            SamplingParams.from_dict(row["params"]),
            DraftBudget(int(budget["depth"]), int(budget["nodes"])),
            dict(row["drafter"]),
            dict(row["setting"]),
            Acceptance.from_dict(row["result"]),
            tuple(prompts["texts"]) if prompts["source"] == "texts" else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("an entry of the recorded acceptance cannot be read", got=repr(error)) from error
    if trial.count != len(trial.result.answers):
        raise ConfigError(
            f"the record of {trial.name!r} is incomplete",
            got=f"{len(trial.result.answers)} answers",
            expected=f"{trial.count}, one a prompt",
        )
    return trial


def chat_of(llm: LLM, text: str) -> Prompt:
    """A user's message where the model has a template for it, else the bare text."""
    return [{"role": "user", "content": text}] if getattr(llm.tokenizer, "chat_template", None) else text


def setting_of(llm: LLM) -> dict[str, object]:
    """What may change the answers by rounding, and with them the counts."""
    loaded = llm.loaded
    return {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "numerics": llm.numerics,
        "device": loaded.device.type,
    }


def _params_to_json(params: SamplingParams) -> dict[str, object]:
    """Temperature, length and seed, and whatever else was set. Raises `ConfigError` for what JSON cannot hold."""
    kept: dict[str, object] = {}
    plain = SamplingParams()
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name in ("temperature", "max_tokens", "seed") or value != getattr(plain, field.name):
            if not isinstance(value, int | float | str | bool):
                raise ConfigError(f"{field.name} cannot be recorded", got=repr(value), expected="a number or a word")
            kept[field.name] = value
    return kept
