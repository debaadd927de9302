"""A result folder read back, for pictures and pages: what is absent stays empty, what is broken is named.

    summary.json     one object: the model, the machine, a list of `runs` with their aggregates
    answers.jsonl    one line for each prompt and side: tokens, where they came from, the rounds

Imports no model library: reading results must not wait for one.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError
from ..system.files import read_json, read_text

SUMMARY, ANSWERS = "summary.json", "answers.jsonl"
PLAIN = "plain"
_KILLED: dict[str, Any] = {"complete": False}
"""The summary of a run that could not write one."""


@dataclass(frozen=True)
class Interval:
    """A speed-up and the bounds of its confidence interval; a bound is None where none was computed."""

    value: float
    low: float | None = None
    high: float | None = None


def short_name(drafter: str) -> str:
    """A drafter's name, of a draft model only the last part of its path."""
    return re.sub(r"model:[^+@]*/", "model:", drafter)


@dataclass(frozen=True)
class OpenedRun:
    """One drafter's aggregates. acceptance, conditional: by position, first drafted token first."""

    drafter: str
    speedup: Interval | None = None
    categories: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    acceptance: tuple[float | None, ...] = ()
    conditional: tuple[float | None, ...] = ()
    batch: int = 1
    raw: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class OpenedRound:
    """One round as it was written down, see `paceline.Round`; pieces: the text of each node of its tree."""

    source: str
    num_drafted: int
    num_accepted: int
    num_emitted: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    confidences: tuple[float, ...]
    seconds: tuple[float, float, float]  # draft, verify, rest
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class OpenedAnswer:
    """One answer of one side.

    pieces: the text of each token, empty where none was written. seconds: of decoding; prefill: of reading the prompt,
    None where it was not told. token_ids is empty for a peer that does not tell them. turn, repeat: from 0.
    """

    id: str
    category: str
    side: str
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    sources: tuple[str, ...]
    rounds: tuple[OpenedRound, ...]
    pieces: tuple[str, ...]
    seconds: float
    prefill: float | None
    prompt: str
    turn: int
    repeat: int
    verdict: str

    @property
    def is_plain(self) -> bool:
        """Decoded without speculation."""
        return self.side == PLAIN

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer by its seconds of decoding; 0 where no time was taken."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Opened:
    """A result folder, or a file of measurements such as `paceline doctor --json` prints.

    pass_times: seconds of a pass by its rows. floor_s: seconds that reading the weights once takes.
    """

    name: str
    path: Path
    summary: Mapping[str, object]
    runs: tuple[OpenedRun, ...]
    pass_times: Mapping[int, float]
    floor_s: float | None

    @property
    def model(self) -> str:
        """The model as a person would name it: the last part of a path."""
        return (
            str(self.summary.get("model") or "").rstrip("/\\").replace("\\", "/").rpartition("/")[2] or "unknown model"
        )

    def answers(self) -> list[OpenedAnswer]:
        """The answers in the order of the file, none where there is no file. Raises `ConfigError` at a bad line."""
        file = self.path / ANSWERS
        if not file.is_file():
            return []
        answers = []
        lines = read_text(file, "the answers").split("\n")
        if self.summary == _KILLED:
            lines[-1] = ""  # it may be cut
        for number, line in enumerate(lines, start=1):
            try:
                answers += [_answer(json.loads(line))] if line.strip() else []
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"line {number} of {file} is no answer",
                    got=f"{type(error).__name__}: {error}",
                    expected="a JSON object with token_ids",
                ) from None
        return answers


def open_results(path: Path | str) -> Opened:
    """Read a result folder, or a JSON file of measurements. Raises `ConfigError` when it is neither.

    Of a run that was killed there is no summary; its answers can be read.
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
    try:
        summary = _KILLED if is_killed else read_json(file, "the results")
        if not isinstance(summary, dict):
            raise ValueError(f"a {type(summary).__name__}, not an object")
        runs = tuple(_run(one, summary) for one in summary.get("runs") or ([summary] if "speedup" in summary else []))
        times = {int(rows): float(seconds) for rows, seconds in (summary.get("pass_times") or {}).items()}
        floor = summary.get("floor_s")
        floor = None if floor is None else float(floor)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as results", got=str(error), expected="one JSON object") from None
    return Opened(
        path.resolve().name if path.is_dir() else path.stem, path, summary, runs, dict(sorted(times.items())), floor
    )


def _run(one: Mapping[str, object], summary: Mapping[str, object]) -> OpenedRun:
    given = cast("Mapping[str, Mapping[str, object]]", one.get("categories") or {})
    found = {name: _interval(value) for name, value in given.items()}
    return OpenedRun(
        drafter=str(one.get("drafter") or "speculative"),
        speedup=_interval(one),
        categories={name: value for name, value in found.items() if value is not None},
        acceptance=_positions(one, "acceptance_by_position", "unconditional"),
        conditional=_positions(one, "acceptance_by_position_conditional", "conditional")
        or _positions(one, "acceptance_by_position", "conditional"),
        batch=int(cast("int", one.get("batch") or summary.get("batch") or 1)),
        raw=one,
    )


def _interval(one: Mapping[str, object]) -> Interval | None:
    """`speedup` with `speedup_low` and `speedup_high`, or `low` and `high`."""
    numbers = [one.get("speedup"), one.get("speedup_low", one.get("low")), one.get("speedup_high", one.get("high"))]
    value, low, high = (None if x is None else float(cast("float", x)) for x in numbers)
    return None if value is None else Interval(value, low, high)


def _positions(one: Mapping[str, object], key: str, part: str) -> tuple[float | None, ...]:
    """A list of numbers, or this part of a list of objects; plain numbers under a key of another part do not count."""
    found = _list(one, key)
    if found and isinstance(found[0], Mapping):
        found = [position.get(part) for position in found]
    elif part == "conditional" and not key.endswith(part):
        found = []
    return tuple(None if x is None else float(x) for x in found)


def _list(one: Mapping[str, object], *names: str) -> list:
    """The first of these keys that holds anything, as a list."""
    return next((list(cast("list", one[name])) for name in names if one.get(name)), [])


def _answer(line: Mapping[str, object]) -> OpenedAnswer:
    tokens = tuple(int(token) for token in cast("list[int] | None", line["token_ids"]) or ())
    side = str(line.get("drafter") or line.get("side") or PLAIN)
    prompt = line.get("prompt")
    prefill = line.get("prefill_s", line.get("prefill"))
    origins = tuple(str(x) for x in _list(line, "origins")) or (PLAIN,) * len(tokens)
    if len(origins) != len(tokens):
        raise ValueError(f"{len(origins)} origins of {len(tokens)} tokens")
    return OpenedAnswer(
        id=str(line.get("id", "")),
        category=str(line.get("category") or ""),
        side=PLAIN if side in ("none", PLAIN) or line.get("side") == PLAIN else side,
        text=str(line.get("text") or ""),
        token_ids=tokens,
        origins=origins,
        sources=tuple(str(x) for x in _list(line, "sources")) or ("",) * len(tokens),
        rounds=tuple(_round(one) for one in _list(line, "rounds")),
        pieces=tuple(str(x) for x in _list(line, "pieces")),
        seconds=float(cast("float", line.get("seconds") or 0.0)),
        prefill=None if prefill is None else float(cast("float", prefill)),
        prompt=prompt if isinstance(prompt, str) else "",  # a number is its place in the run
        turn=int(cast("int", line.get("turn") or 0)),
        repeat=int(cast("int", line.get("repeat") or 0)),
        verdict=str(line.get("verdict") or ""),
    )


def _round(one: Mapping[str, object]) -> OpenedRound:
    parents = tuple(int(x) for x in _list(one, "parents")) or (-1,)
    if any(not -1 <= parent < child for child, parent in enumerate(parents)):
        raise ValueError("a tree whose parent does not come before its child")
    draft, verify, rest = (float(cast("float", one.get(name) or 0.0)) for name in ("draft_s", "verify_s", "rest_s"))
    return OpenedRound(
        source=str(one.get("source") or ""),
        num_drafted=int(cast("int", one.get("num_drafted") or 0)),
        num_accepted=int(cast("int", one.get("num_accepted") or 0)),
        num_emitted=int(cast("int", one.get("num_emitted") or 0)),
        token_ids=tuple(int(x) for x in _list(one, "token_ids")),
        parents=parents,
        path=tuple(int(x) for x in _list(one, "path")),
        confidences=tuple(float(x) for x in _list(one, "confidences")),
        seconds=(draft, verify, rest),
        pieces=tuple(str(x) for x in _list(one, "pieces", "round_pieces")),
    )
