"""The calibration file: how often a confident small answer differed from the large model's, by threshold.

The guarantee depends only on these counts. The threshold is computed from them for any bound (`Calibration.choose`). A
file that was changed since it was written is refused.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import to_jsonable_python
from torch import nn

from ..core.request import SamplingParams, TokenLogprob
from ..errors import ConfigError, IncompatibleModels
from ..hf.fingerprint import fingerprint
from ..llm import LLM
from ..quant.blocks import BlockLinear
from ..quant.packed import CodedLinear
from ..schema import Many, checked, checked_call, validate
from ..system.files import read_kind, to_json, write_text
from .bound import Point, Share, last_that_holds, prompts_needed, upper_bound

VERSION = 2
_KIND = "paceline-cascade"
SIGN = f'{{\n "kind": "{_KIND}"'
"""The beginning of such a file."""
_AGAIN = "run `paceline calibrate` again"
_SAMPLE = 256  # scales of a rounded layer that are hashed
_Count = Annotated[int, Field(ge=0)]
_UNRELATED = (
    "max_tokens", "seed", "n", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "extra_args",
)  # fmt: skip
"""Sampling options that do not change which answers differ: a shorter limit cuts equal texts equally."""
THRESHOLDS: tuple[float, ...] = tuple(
    [1 - 10 ** (-power / 4) for power in range(20, 4, -1)]  # 0.99999 down to 0.944
    + [(94 - 2 * step) / 100 for step in range(48)]  # 0.94 down to 0
)
"""Fixed before any data, so that choosing among them is valid on the prompts that were counted."""


class Signal(StrEnum):
    """Kinds of confidence: one number from 0 to 1 for a whole answer.

    All are computed from the small model's probabilities, before temperature and processors, of its tokens. The end of
    the text is one of them, since the decision to stop is a part of the answer.
    """

    MIN_PROB = "min_prob"  # of the least likely token
    MEAN_PROB = "mean_prob"  # geometric mean: exp of the mean log-probability
    MARGIN = "margin"  # the smallest difference in probability to the next best token


def confidences(logprobs: Sequence[TokenLogprob]) -> Mapping[Signal, float]:
    """All kinds of confidence of one answer, given the two most likely tokens at each position."""
    own = [choice.logprob for choice in logprobs]
    leads = []
    for choice in logprobs:
        rivals = [logprob for token, logprob in choice.top.items() if token != choice.token_id]
        leads.append(math.exp(choice.logprob) - (math.exp(max(rivals)) if rivals else 0.0))
    return {
        Signal.MIN_PROB: math.exp(min(own)),
        Signal.MEAN_PROB: math.exp(math.fsum(own) / len(own)),
        Signal.MARGIN: max(0.0, min(leads)),  # negative where a sampled token is not the most likely
    }


@checked
class ModelId:
    """Everything that determines the answers of a model. `name` is for messages and is not compared.

    fingerprint: the hash of the checkpoint (`hf.fingerprint`), the same before and after rounding.
    weights: the formats of rounded layers and a hash of their scales, "" where there are none.
    dtype: the dtype of everything else.
    vision: the fingerprint of the vision tower, "" where there is none.
    """

    name: str
    fingerprint: str
    weights: str
    dtype: str
    vision: str = ""

    @classmethod
    def of(cls, llm: LLM) -> "ModelId":
        """The identity of the model as it is loaded now."""
        loaded = llm.loaded
        dtype = str(loaded.dtype).removeprefix("torch.")
        vision = "" if loaded.vision is None else fingerprint(loaded.vision.tower)
        return cls(loaded.name, loaded.fingerprint, _rounding(loaded.model), dtype, vision)

    def difference(self, other: "ModelId") -> str | None:
        """The difference to the other model as text; None for the same model."""
        for key in ("fingerprint", "vision", "weights", "dtype"):
            then, now = getattr(self, key), getattr(other, key)
            if then != now:
                return f"{key} {then[:18] or 'none'} there ({self.name}), {now[:18] or 'none'} here ({other.name})"
        return None


def _rounding(model: nn.Module) -> str:
    """Formats of the rounded layers and a hash of some of their scales or weights, which no kernel layout changes."""
    formats, digest = set[str](), hashlib.sha256()
    for path, module in sorted(model.named_modules()):
        if isinstance(module, BlockLinear):
            size = module.in_features * module.out_features
            kind, sample = module.form.name, module.values(range(0, size, max(1, size // _SAMPLE)))
            kind += "" if module.input_bits == 8 else f" x int{module.input_bits}"
        elif isinstance(module, CodedLinear):
            kind, sample = module.form, module.scales
        else:
            continue
        formats.add(kind.lower())
        digest.update(f"{path} {kind} {module.out_features} {module.in_features}".encode())
        digest.update(sample.flatten()[:_SAMPLE].float().cpu().numpy().tobytes())
    return f"{'+'.join(sorted(formats))} {digest.hexdigest()[:12]}" if formats else ""


@dataclass(frozen=True)
class ChosenThreshold:
    """A threshold and its guarantee.

    max_disagreement: the bound, which holds with `confidence`.
    point: the counts at the threshold.
    coverage: the share of all prompts that the small model answers alone.
    wrong_alone: the share of confident answers that differed, and its Clopper-Pearson bound. It is for information and
        not guaranteed.
    """

    signal: Signal
    threshold: float
    max_disagreement: float
    confidence: float
    point: Point
    coverage: float
    wrong_alone: tuple[float, float]


@checked
class Calibration:
    """Counts of `count` prompts at each threshold, for each kind of confidence that was fixed beforehand.

    ended: the small answers that ended within `short_limit` tokens.
    small_context: the small model's `max_model_len`. With a larger one it would answer prompts that were counted as too
        long for it.
    sampling: the sampling options that are not the default.
    prompts: their file, sha256 and models.
    provenance: versions, machine and date.
    """

    small: ModelId
    large: ModelId
    count: Annotated[int, Field(ge=1)]
    ended: _Count
    curves: Annotated[Mapping[Signal, Annotated[Many[Point], Field(min_length=1)]], Field(min_length=1)]
    short_limit: _Count
    small_context: _Count
    max_disagreement: Share
    confidence: Share
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @checked_call
    def choose(self, max_disagreement: Share | None = None, confidence: Share | None = None) -> ChosenThreshold:
        """The threshold with the most answers of the small model and P(confident and different) <= max_disagreement.

        Of several kinds of confidence the best is taken; each is then tested more strictly (Bonferroni).
        Raises `ConfigError` where the sample is too small for the bound, with the number of prompts that are missing.
        """
        limit = self.max_disagreement if max_disagreement is None else max_disagreement
        level = self.confidence if confidence is None else confidence
        each = 1 - (1 - level) / len(self.curves)
        thresholds = [
            (point.covered, signal, point)
            for signal, points in self.curves.items()
            if (point := last_that_holds(points, self.count, limit, each)) is not None
        ]
        if not thresholds:
            raise too_small(self.count, min(points[0].differ for points in self.curves.values()), limit, level, each)
        covered, signal, point = max(thresholds, key=lambda threshold: threshold[0])
        alone = (point.differ / covered if covered else 0.0, upper_bound(point.differ, covered, level))
        return ChosenThreshold(signal, point.threshold, limit, level, point, covered / self.count, alone)

    def check_room(self, small_context: int) -> None:
        """Raises `ConfigError` where the small model's `max_model_len` is larger than in the calibration."""
        if small_context > self.small_context:
            raise ConfigError(
                "the small model's context is longer than in the calibration, so it would answer prompts that were "
                "counted as too long for it",
                got=f"{small_context} tokens",
                expected=f"at most {self.small_context}",
                fix=f"pass max_model_len={self.small_context} to the small LLM, or calibrate again",
            )

    def check_models(self, small: ModelId, large: ModelId) -> None:
        """Raises `IncompatibleModels` unless these are the calibrated models."""
        for role, then, now in (("small", self.small, small), ("large", self.large, large)):
            if (difference := then.difference(now)) is not None:
                fix = f"{_AGAIN} with these models"
                raise IncompatibleModels(f"the calibration was made with another {role} model", got=difference, fix=fix)

    def params(self, max_tokens: int, seed: int = 0) -> SamplingParams:
        """The calibrated sampling options, for answers of at most `max_tokens`."""
        options = {**self.sampling, "max_tokens": max_tokens, "seed": seed}
        return validate(SamplingParams, options, "the calibration's sampling")

    def as_dict(self) -> dict[str, object]:
        """The content of the file."""
        choice, own = self.choose(), asdict(self)
        counts = {name: own.pop(name) for name in ("count", "ended")}
        chosen = {"signal": choice.signal.value, "threshold": choice.threshold}
        body = {"kind": _KIND, "version": VERSION, **own, **chosen, "prompts": {**counts, **self.prompts}}
        return {**body, "sha256": digest(body)}

    def save(self, path: Path | str) -> None:
        """Write the file atomically. Raises `ConfigError` where no threshold is valid, and OSError."""
        write_text(path, to_json(self.as_dict(), indent=1) + "\n")


def too_small(count: int, differ: int, limit: float, confidence: float, each: float) -> ConfigError:
    """The error for a sample of which `differ` differ at the strictest threshold. each: the confidence of one test."""
    need = prompts_needed(differ, limit, each)
    seen = f", of which {differ} differ even at the strictest threshold" if differ else ""
    helps = ", which helps only if hardly any of them differs" if differ else ""
    return ConfigError(
        f"{count} prompts cannot guarantee a disagreement of at most {limit:g} with confidence {confidence:g}",
        got=f"{count} prompts{seen}",
        expected=f"at least {need} prompts" + (f" with no more than these {differ}" if differ else ""),
        fix=f"calibrate on at least {need - count} more prompts{helps}, or allow a larger max_disagreement",
    )


def sampling_options(params: SamplingParams) -> dict[str, object]:
    """The sampling options that shape an answer's distribution, where they are not the default, for JSON."""
    default = vars(SamplingParams())
    options = {name: getattr(params, name) for name in default if name not in _UNRELATED}
    changed = {name: value for name, value in options.items() if value != default[name]}
    return to_jsonable_python(changed, fallback=repr)


def load_calibration(path: Path | str) -> Calibration:
    """Read a calibration. Raises `ConfigError` for another file, another version, or a file that was changed."""
    content = read_kind(path, _KIND, VERSION, _AGAIN)
    body = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != digest(body):
        raise ConfigError(f"{str(path)!r} was changed or damaged since it was written", fix=_AGAIN)
    own = {key: value for key, value in body.items() if key not in ("kind", "version", "signal", "threshold")}
    prompts = dict(own["prompts"]) if isinstance(own.get("prompts"), dict) else {}
    counts = {name: prompts.pop(name, None) for name in ("count", "ended")}
    return validate(Calibration, {**own, **counts, "prompts": prompts}, f"the calibration {str(path)!r}")


def digest(body: Mapping[str, object]) -> str:
    """The checksum of everything else in the file."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
