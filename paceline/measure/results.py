"""The result folder of `paceline bench`: written during the run, and read back for plots and pages.

    summary.json         one object: the model, the machine, a list of `runs` with their aggregates; written at the end
    answers.jsonl        one line for each prompt and side: tokens, where they came from, the rounds
    peer_answers.jsonl   the same of other systems

Measured answers are kept however the run ends. When reading, missing values stay empty, and damaged ones are errors.
Imports no model library, so that reading results is fast.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, AliasPath, BaseModel, ConfigDict, Field, model_validator

from ..core.round import MIN_TIMED, Round
from ..errors import ConfigError
from ..system.files import read_json, read_text

SUMMARY, ANSWERS, PEER_ANSWERS = "summary.json", "answers.jsonl", "peer_answers.jsonl"
PLAIN = "plain"


def last_part(name: str) -> str:
    """The last part of a path, of either system."""
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]


def short_name(drafter: str) -> str:
    """A drafter's name, with only the last part of a draft model's path."""
    return re.sub(r"model:[^+@]*/", "model:", drafter)


def version_of(provenance: Mapping[str, Any]) -> str:
    """The version and the commit that results were made with; empty where neither is known."""
    commit = f" ({str(provenance['git_commit'])[:7]})" if provenance.get("git_commit") else ""
    return f"paceline {provenance['paceline']}{commit}" if provenance.get("paceline") else ""


class _Saved(BaseModel):
    """Part of a line; null values count as missing, unknown keys of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


@dataclass(frozen=True)
class SavedRound(Round):
    """A round, and the texts of its tree's nodes, if they were recorded."""

    pieces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(not -1 <= parent < child for child, parent in enumerate(self.parents)):
            raise ValueError("a tree whose parent does not come before its child")

    @property
    def texts(self) -> tuple[str, ...]:
        return _texts(self.token_ids, self.pieces)


class SavedAnswer(_Saved):
    """One answer of one side. pieces: the texts of its tokens, if they were recorded.

    num_tokens: tokens after the prefill; seconds: of decoding them. turn, repeat: from 0.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()
    id: str = ""
    category: str = ""
    side: str = PLAIN
    text: str = ""
    origins: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    rounds: tuple[SavedRound, ...] = ()
    num_tokens: int = 0
    seconds: float = 0.0
    prefill_s: float | None = None
    prompt: str = ""
    turn: int = 0
    repeat: int = 0
    verdict: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> "SavedAnswer":
        if len(self.origins) != len(self.token_ids):
            raise ValueError(f"{len(self.origins)} origins of {len(self.token_ids)} tokens")
        return self

    @property
    def texts(self) -> tuple[str, ...]:
        return _texts(self.token_ids, self.pieces)

    @property
    def is_plain(self) -> bool:
        return self.side == PLAIN

    @property
    def tokens_per_s(self) -> float:
        """Tokens over seconds of decoding; 0 without a time, or if the answer is too short."""
        return self.num_tokens / self.seconds if self.seconds > 0 and self.num_tokens >= MIN_TIMED else 0.0


def _texts(token_ids: tuple[int, ...], pieces: tuple[str, ...]) -> tuple[str, ...]:
    """The pieces; ids in brackets where there are none."""
    return pieces if len(pieces) == len(token_ids) else tuple(f"[{token}]" for token in token_ids)


def _gain(name: str, part: str) -> Any:
    """A field that `paceline tune` writes as part of a `Gain`."""
    return Field(None, validation_alias=AliasChoices(name, part, AliasPath("overall", part)))


class SavedSpeedup(_Saved):
    """A speed-up and the bounds of its confidence interval; None where none was computed."""

    speedup: float | None = _gain("speedup", "value")
    speedup_low: float | None = _gain("speedup_low", "low")
    speedup_high: float | None = _gain("speedup_high", "high")


class SavedRun(SavedSpeedup):
    """One drafter's aggregates. acceptance: by position in the draft; rounds: how many drafted that position."""

    drafter: str = "speculative"
    categories: dict[str, SavedSpeedup] = {}
    acceptance: tuple[float | None, ...] = Field((), validation_alias="acceptance_by_position")
    rounds: tuple[int, ...] = Field((), validation_alias="rounds_by_position")
    batch: int = 1
    mean_acceptance_length: float | None = None
    tokens_per_s: float | None = Field(None, validation_alias=AliasChoices("speculative_tokens_per_s", "tokens_per_s"))
    verdicts: dict[str, int] = {}


class SavedPeer(_Saved):
    """Another system's aggregates."""

    side: str = "peer"
    speedup: float | None = Field(None, validation_alias=AliasPath("over_plain", "speedup"))
    mean_acceptance_length: float | None = None
    tokens_per_s: float | None = None


class SavedResults(_Saved):
    """A result folder, or what `paceline bench`, `check`, `demo`, `doctor` or `tune` prints with --json, as a file.

    model: the last part of its path. pass_times: seconds of a pass by its rows. floor_s: seconds of reading the weights
    once. complete: False where the run was interrupted or killed.
    """

    name: str
    path: Path
    model: Annotated[str, AfterValidator(last_part)] = "unknown model"
    runs: tuple[SavedRun, ...] = ()
    peers: tuple[SavedPeer, ...] = ()
    pass_times: Annotated[dict[int, float], AfterValidator(lambda times: dict(sorted(times.items())))] = {}
    floor_s: float | None = None
    floor_fraction: float | None = None
    plain_tokens_per_s: float | None = None
    numerics: str | None = None
    complete: bool = True
    provenance: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_runs(cls, data: object) -> object:
        """`check` and `demo` are one run, with its numbers at the top; the runs of `tune` are its candidates."""
        if not isinstance(data, dict) or data.get("runs"):
            return data
        return {**data, "runs": data.get("candidates") or ([data] if "drafter" in data else [])}

    def answers(self) -> list[SavedAnswer]:
        """The answers in the order of the file, none without a file. Raises `ConfigError` for an invalid line."""
        file = self.path / ANSWERS
        if not file.is_file():
            return []
        answers = []
        # Behind the last line feed is nothing, or a line that was cut when the run was killed.
        for number, line in enumerate(read_text(file, "the answers").split("\n")[:-1], start=1):
            try:
                answers += [SavedAnswer.model_validate(json.loads(line))] if line.strip() else []
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"line {number} of {file} is no answer",
                    got=f"{type(error).__name__}: {error}",
                    expected="a JSON object with token_ids",
                ) from None
        return answers


def open_results(path: Path | str) -> SavedResults:
    """Read a result folder, or a JSON file of measurements. Raises `ConfigError` when it is neither.

    A run that was killed has no summary, but its answers can be read.
    """
    path = Path(path)
    file = path / SUMMARY if path.is_dir() else path
    is_killed = not file.is_file() and (path / ANSWERS).is_file()
    if not file.is_file() and not is_killed:
        raise ConfigError(
            "this is no result folder" if path.exists() else "there is no such result",
            got=str(path),
            expected=f"a folder with {SUMMARY}, as `paceline bench` writes it",
        )
    name = path.resolve().name if path.is_dir() else path.stem
    try:
        summary = {"complete": False} if is_killed else read_json(file, "the results")
        return SavedResults.model_validate({**summary, "name": name, "path": path})
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read as results",
            got=getattr(error, "got", error),
            expected="a folder that `paceline bench` wrote, or a file of what a measurement prints with --json",
        ) from None
