"""How to speculate, in words: vLLM's `speculative_config` keys and ours, and the short names of the command line.

method        keys it takes, besides num_speculative_tokens and rejection_sample_method    tokens by default
none                                                                                       0
ngram         prompt_lookup_max, prompt_lookup_min, match                                  8
draft_model   model, dtype                                                                 5
self_int4     group_size, lm_head                                                          4
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .errors import ConfigError, LossyNotAllowed

if TYPE_CHECKING:
    from .core.interfaces import Drafter, DraftPolicy, Verifier

_ANY_METHOD = ("method", "num_speculative_tokens", "rejection_sample_method")
_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min", "match"),
    "draft_model": ("model", "dtype"),
    "self_int4": ("group_size", "lm_head"),
}
# Copying costs nothing, so a long guess is worth it; a drafting pass costs time even when it is rejected.
_NUM_TOKENS = {"none": 0, "ngram": 8, "draft_model": 5, "self_int4": 4}
_CHOICES: dict[str, tuple[object, ...]] = {
    "method": tuple(_KEYS),
    "match": ("recent", "first"),
    "group_size": (32, 64, 128, 256),
    "lm_head": ("auto", "int4", "shared"),
    "dtype": ("auto", "bfloat16", "float16", "float32", "float64"),
    "rejection_sample_method": ("exact", "standard", "ratio", "typical"),
}
_INTEGERS = {"num_speculative_tokens": (0, 64), "prompt_lookup_max": (1, 32), "prompt_lookup_min": (1, 32)}
_SHORT_NAMES = {"none": "none", "lookup": "ngram", "ngram": "ngram", "self-int4": "self_int4", "self_int4": "self_int4"}


@dataclass(frozen=True)
class SpecConfig:
    """A drafter, how much it drafts and the rule that judges its drafts; made by `parse`.

    rejection_sample_method: "exact" gives the tokens of plain decoding; "standard" (also "ratio") the same law, other
    tokens; "typical" changes the answers and needs consent.
    """

    method: str = "none"
    num_speculative_tokens: int = 0
    rejection_sample_method: str = "exact"
    model: str | None = None
    dtype: str | None = None
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    match: str = "recent"
    group_size: int = 32
    lm_head: str = "auto"

    @property
    def name(self) -> str:
        """The drafter in a few words, for people."""
        short = {"ngram": "lookup", "self_int4": "self-int4", "draft_model": f"model:{self.model}"}
        return short.get(self.method, self.method)

    def as_dict(self) -> dict[str, object]:
        """What was chosen, without the keys that this method does not read."""
        return {key: getattr(self, key) for key in (*_ANY_METHOD, *_KEYS[self.method])}

    def build(self, allow_lossy: bool = False) -> "tuple[Drafter, DraftPolicy, Verifier]":
        """The objects for `LLM(drafter=, policy=, verifier=)`.

        Raises `LossyNotAllowed` for "typical" without `allow_lossy`, and what `zoo.resolve` raises for a model.
        """
        from .policy import Fixed
        from .verify import Coupled, Ratio, Typical

        if self.rejection_sample_method == "typical":
            if not allow_lossy:
                raise LossyNotAllowed(
                    'rejection_sample_method "typical" changes what the model answers',
                    fix='allow it (--allow-lossy), or use "exact" (same tokens) or "standard" (same law)',
                )
            verifier: Verifier = Typical(allow_lossy=True)
        else:
            verifier = Coupled() if self.rejection_sample_method == "exact" else Ratio()
        return self._drafter(), Fixed(self.num_speculative_tokens), verifier

    def _drafter(self) -> "Drafter":
        from .drafters import DraftModel, Plain, PromptLookup, SelfQuantized
        from .zoo import resolve

        if self.method == "ngram":
            return PromptLookup(self.prompt_lookup_max, self.prompt_lookup_min, self.match)  # type: ignore[arg-type]
        if self.method == "self_int4":
            return SelfQuantized(self.group_size, self.lm_head)  # type: ignore[arg-type]
        if self.method == "draft_model":
            assert self.model is not None  # parse() sees to it
            return DraftModel(resolve(self.model), self.dtype)
        return Plain()


def parse(what: "str | Mapping[str, object] | None", num_speculative_tokens: int | None = None) -> SpecConfig:
    """Read a short name (none, lookup, self-int4, model:NAME), a mapping of vLLM's keys, or such a mapping as JSON.

    num_speculative_tokens: overrules the mapping's. Raises `ConfigError` that lists what is known.
    """
    if what is None:
        given: dict[str, object] = {}
    elif isinstance(what, str):
        given = _from_json(what) if what.lstrip()[:1] in ("{", "[", '"') else _from_short_name(what)
    else:
        given = dict(what)
    for key in given:
        if key not in _ALL_KEYS:
            raise ConfigError(
                f"unknown speculative_config key {key!r}", expected=_one_of(_ALL_KEYS), fix=_meant(key, _ALL_KEYS)
            )
    if num_speculative_tokens is not None:
        given["num_speculative_tokens"] = num_speculative_tokens
    given = {key: value for key, value in given.items() if value is not None}
    method = given.setdefault("method", "draft_model" if "model" in given else "none")
    for key, value in given.items():
        _check_value(key, value)
    assert isinstance(method, str)
    for key in given:
        if key not in (*_ANY_METHOD, *_KEYS[method]):
            raise ConfigError(
                f"method {method!r} does not take {key!r}", expected=_one_of((*_ANY_METHOD, *_KEYS[method]))
            )
    if method == "draft_model" and "model" not in given:
        raise ConfigError('method "draft_model" needs "model"', expected="a folder, a hub id or a name of the zoo")
    given.setdefault("num_speculative_tokens", _NUM_TOKENS[method])
    if method != "none" and given["num_speculative_tokens"] == 0:
        raise ConfigError(
            "num_speculative_tokens is 0, which drafts nothing", expected="at least 1", fix='use method "none" for that'
        )
    config = SpecConfig(**given)  # type: ignore[arg-type]
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            "prompt_lookup_min is above prompt_lookup_max",
            got=f"{config.prompt_lookup_min} and {config.prompt_lookup_max}",
            expected="min <= max",
        )
    return config


_ALL_KEYS = tuple(field.name for field in fields(SpecConfig))


def _from_json(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "the speculative config is not valid JSON",
            got=f"{error.msg} at character {error.pos}",
            expected="""for example {"method": "ngram", "num_speculative_tokens": 8}""",
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("the speculative config is not a JSON object", got=type(value).__name__)
    return value


def _from_short_name(name: str) -> dict[str, object]:
    if name.startswith("model:"):
        if not name.removeprefix("model:"):
            raise ConfigError(
                "the drafter names no model", got=repr(name), expected="model: and a folder, hub id or zoo name"
            )
        return {"method": "draft_model", "model": name.removeprefix("model:")}
    if name not in _SHORT_NAMES:
        known = ("none", "lookup", "self-int4", "model:PATH_OR_ID")
        raise ConfigError(f"unknown drafter {name!r}", expected=_one_of(known), fix=_meant(name, tuple(_SHORT_NAMES)))
    return {"method": _SHORT_NAMES[name]}


def _check_value(key: str, value: object) -> None:
    if key in _CHOICES:
        choices = _CHOICES[key]
        if value not in choices or isinstance(value, bool):
            fix = _meant(str(value), tuple(map(str, choices)))
            raise ConfigError(f"unknown {key} {value!r}", expected=_one_of(choices), fix=fix)
    elif key in _INTEGERS:
        low, high = _INTEGERS[key]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{key} is out of range", got=repr(value), expected=f"an integer from {low} to {high}")
    elif not isinstance(value, str) or not value:
        raise ConfigError(f"{key} is not a name", got=repr(value), expected="a non-empty string")


def _one_of(names: tuple[object, ...]) -> str:
    return "one of " + ", ".join(map(str, names))


def _meant(name: str, known: tuple[str, ...]) -> str | None:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else None
