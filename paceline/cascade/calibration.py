"""What a calibration found, as a file: how often a confident small answer was not the large model's, by threshold.

Only counts are promised from, so the file keeps the counts; the threshold follows from them (`Calibration.choose`) for
whatever bound is asked for, and the one in the file must be what follows for its own.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.request import SamplingParams
from ..errors import ConfigError, IncompatibleModels
from ..schema import Many, checked, validate
from ..system.files import is_kind, read_json, to_json, write_text
from .bound import Point, check_promise, last_that_holds, prompts_needed, upper_bound
from .confidence import Signal
from .identity import ModelId

VERSION = 2
_KIND = "paceline-cascade"
is_calibration = is_kind(_KIND)
"""Whether the beginning of a file says that `paceline calibrate` wrote it."""
_AGAIN = "run `paceline calibrate` again"
_Count = Annotated[int, Field(ge=0)]
_NOT_LAW = ("max_tokens", "seed", "n", "logprobs")
"""Options that leave it untouched which of the two models' answers differ: a shorter limit cuts equal texts equally."""


@dataclass(frozen=True)
class Observed:
    """One prompt: how sure the small model was, and whether its answer is the large model's.

    confidences: None where the small answer did not end within the window; then `agrees` is None as well.
    """

    confidences: Mapping[Signal, float] | None
    agrees: bool | None


@dataclass(frozen=True)
class Choice:
    """A threshold and what it promises.

    max_disagreement: the bound, with `confidence`. point: its counts. wrong_alone: of confident answers, the share that
    differed, and Clopper and Pearson's bound of it at that point alone; told, not promised.
    """

    signal: Signal
    threshold: float
    max_disagreement: float
    confidence: float
    point: Point
    coverage: float
    differ: float
    wrong_alone: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """Counts of n prompts for each threshold, for each kind of confidence that was declared beforehand.

    short_limit: tokens within which the small answer must end. small_context: tokens that the small model had room for;
    with more room it would answer alone where it was counted as not having ended. sampling: the options of the law,
    where not default. prompts: file, sha256. provenance: versions, machine, date.
    """

    small: ModelId
    large: ModelId
    n: int
    ended: int
    curves: Mapping[Signal, Sequence[Point]]
    short_limit: int
    small_context: int
    max_disagreement: float
    confidence: float
    sampling: Mapping[str, object] = field(default_factory=dict[str, object])
    prompts: Mapping[str, object] = field(default_factory=dict[str, object])
    provenance: Mapping[str, object] = field(default_factory=dict[str, object])

    def choose(self, max_disagreement: float | None = None, confidence: float | None = None) -> Choice:
        """The threshold that answers most alone with P(confident and different) <= max_disagreement.

        Of several kinds of confidence the best is taken, at the price of a stricter test of each (Bonferroni).
        Raises `ConfigError` where the sample is too small to promise it, with the number of prompts that are missing.
        """
        limit = self.max_disagreement if max_disagreement is None else max_disagreement
        sure = self.confidence if confidence is None else confidence
        check_promise(limit, sure)
        each = 1 - (1 - sure) / len(self.curves)
        found = [
            (point.covered, signal, point)
            for signal, points in self.curves.items()
            if (point := last_that_holds(points, self.n, limit, each)) is not None
        ]
        if not found:
            raise self._refuse(limit, sure, each)
        covered, signal, point = max(found, key=lambda one: one[0])
        alone = (point.differ / covered if covered else 0.0, upper_bound(point.differ, covered, sure))
        coverage, differ = covered / self.n, point.differ / self.n
        return Choice(signal, point.threshold, limit, sure, point, coverage, differ, alone)

    def check_room(self, small_context: int) -> None:
        """Raises `ConfigError` where the small model has more room, in tokens, than it had."""
        if small_context > self.small_context:
            raise ConfigError(
                "the small model has more room than when it was calibrated, so it would answer prompts that were "
                "counted as too long for it",
                got=f"{small_context} tokens",
                expected=f"at most {self.small_context}",
                fix=f"pass max_model_len={self.small_context} to the small LLM, or calibrate again",
            )

    def check_models(self, small: ModelId, large: ModelId) -> None:
        """Raises `IncompatibleModels` unless these are the models it was made with."""
        for role, then, now in (("small", self.small, small), ("large", self.large, large)):
            if (told := then.difference(now)) is not None:
                raise IncompatibleModels(
                    f"the calibration was made with another {role} model", got=told, fix=_AGAIN + " with these models"
                )

    def as_dict(self) -> dict[str, object]:
        """The content of the file."""
        choice = self.choose()
        body: dict[str, object] = {
            "kind": _KIND,
            "version": VERSION,
            "small": self.small.as_dict(),
            "large": self.large.as_dict(),
            "short_limit": self.short_limit,
            "small_context": self.small_context,
            "max_disagreement": self.max_disagreement,
            "confidence": self.confidence,
            "signal": choice.signal.value,
            "threshold": choice.threshold,
            "prompts": {"count": self.n, "ended": self.ended, **self.prompts},
            "sampling": dict(self.sampling),
            "curves": {s.value: [[p.threshold, p.covered, p.differ] for p in c] for s, c in self.curves.items()},
            "provenance": dict(self.provenance),
        }
        return {**body, "sha256": _digest(body)}

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all. Raises `ConfigError` where it promises nothing, OSError as files do."""
        write_text(path, to_json(self.as_dict(), indent=1) + "\n")

    def _refuse(self, limit: float, confidence: float, each: float) -> ConfigError:
        best = min((points[0].differ for points in self.curves.values()), default=0)
        need = prompts_needed(best, limit, each)
        where = f"{best} of {self.n} prompts differ even at the strictest threshold"
        fix = f"calibrate on at least {need - self.n} more prompts"
        if best:
            fix += ", which helps only if hardly any of them differs; or allow a larger max_disagreement"
        return ConfigError(
            f"{self.n} prompts cannot promise a disagreement of at most {limit:g} with confidence {confidence:g}",
            got=where if best else f"{self.n} prompts",
            expected=f"at least {need} prompts" + (f" with no more than these {best}" if best else ""),
            fix=fix,
        )


def curve_of(observed: Sequence[Observed], signal: Signal, thresholds: Sequence[float]) -> tuple[Point, ...]:
    """The counts at each threshold, which must fall."""
    ended = [(one.confidences[signal], bool(one.agrees)) for one in observed if one.confidences is not None]
    return tuple(
        Point(t, sum(c >= t for c, _ in ended), sum(c >= t and not agrees for c, agrees in ended)) for t in thresholds
    )


def sampling_of(params: SamplingParams) -> dict[str, object]:
    """The options that make the law of an answer, where they are not the default."""
    default = SamplingParams()
    pairs = ((one.name, getattr(params, one.name)) for one in fields(params) if one.name not in _NOT_LAW)
    told: dict[str, object] = {name: list(value) if isinstance(value, tuple) else value for name, value in pairs
            if value != getattr(default, name)}  # fmt: skip
    bias = told.get("logit_bias")
    if isinstance(bias, dict):
        told["logit_bias"] = {str(token): value for token, value in bias.items()}
    return told


def params_of(made: "Calibration", max_tokens: int, seed: int = 0) -> SamplingParams:
    """What `sampling_of` told, for answers of at most `max_tokens`."""
    sampling = dict(made.sampling)
    bias = sampling.get("logit_bias")
    if isinstance(bias, dict):
        sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams.from_dict({**sampling, "max_tokens": max_tokens, "seed": seed})


def load_calibration(path: Path | str) -> Calibration:
    """Read such a file. Raises `ConfigError` for anything else, another version, or one that was changed since."""
    given = read_json(path, "the calibration")
    if not isinstance(given, dict) or given.get("kind") != _KIND:
        raise ConfigError(f"{str(path)!r} is not a calibration", got="something else", fix=_AGAIN)
    if given.get("version") != VERSION:
        got = given.get("version")
        raise ConfigError(f"{str(path)!r} is of another version", got=got, expected=VERSION, fix=_AGAIN)
    body = {key: value for key, value in given.items() if key != "sha256"}
    if given.get("sha256") != _digest(body):
        raise ConfigError(f"{str(path)!r} was changed or damaged since it was written", fix=_AGAIN)
    read = validate(_File, given, f"the calibration {str(path)!r}")
    made = _parse(read)
    choice = made.choose()
    if (choice.signal, choice.threshold) != (read.signal, read.threshold):
        raise ConfigError(f"{str(path)!r} has a threshold that its counts do not give", fix=_AGAIN)
    return made


_Rows = Annotated[Many[tuple[float, int, int]], Field(min_length=1)]


@checked
class _File:
    """The content of the file; curves hold (threshold, covered, differ)."""

    kind: Literal["paceline-cascade"]
    version: Literal[2]
    small: Mapping[str, Any]
    large: Mapping[str, Any]
    short_limit: _Count
    small_context: _Count
    max_disagreement: float
    confidence: float
    signal: Signal
    threshold: float
    prompts: Mapping[str, Any]
    sampling: Mapping[str, Any]
    curves: Annotated[Mapping[Signal, _Rows], Field(min_length=1)]
    provenance: Mapping[str, Any]
    sha256: str


@checked
class _Counted:
    count: Annotated[int, Field(ge=1)]
    ended: _Count


def _parse(read: _File) -> Calibration:
    counted = validate(_Counted, {key: read.prompts.get(key) for key in ("count", "ended")}, "the calibration: prompts")
    n, ended = counted.count, counted.ended
    curves: dict[Signal, tuple[Point, ...]] = {}
    for name, rows in read.curves.items():
        points = curves[name] = tuple(itertools.starmap(Point, rows))
        steps = itertools.pairwise(points)
        if any(a.threshold <= b.threshold or a.covered > b.covered or a.differ > b.differ for a, b in steps):
            raise ConfigError(f"the curve of {name} does not rise as its thresholds fall", fix=_AGAIN)
        if any(not 0 <= p.differ <= p.covered <= ended <= n for p in points):
            raise ConfigError(f"the curve of {name} counts more than there is", fix=_AGAIN)
    return Calibration(
        ModelId.from_dict(dict(read.small)),
        ModelId.from_dict(dict(read.large)),
        n,
        ended,
        curves,
        read.short_limit,
        read.small_context,
        read.max_disagreement,
        read.confidence,
        read.sampling,
        {key: value for key, value in read.prompts.items() if key not in ("count", "ended")},
        read.provenance,
    )


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
