"""How to speculate, in words: vLLM's `speculative_config` keys and ours, and the short names of the command line.

method        keys it takes, besides policy, num_speculative_tokens and rejection_sample_method    fixed tokens
none                                                                                               0
ngram         prompt_lookup_max, prompt_lookup_min, match                                          8
draft_model   model, dtype, weights                                                                5
self_int4     group_size, lm_head, bits                                                            4
choose        drafters: a list of such configurations, of which the policy takes the best          5

policy: "cost_model" drafts what pays on this machine for this text, up to num_speculative_tokens (16); "dynamic" and
"gate" adapt by simpler rules; "fixed" always drafts as many. A number without a policy means "fixed".
"""

import difflib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

from .errors import ConfigError, LossyNotAllowed

if TYPE_CHECKING:
    from .core.interfaces import Drafter, DraftPolicy, Verifier
    from .policy import Profile

_ANY_METHOD = ("method", "policy", "num_speculative_tokens", "rejection_sample_method")
_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min", "match"),
    "draft_model": ("model", "dtype", "weights"),
    "self_int4": ("group_size", "lm_head", "bits"),
    "choose": ("drafters",),
}
# Copying costs nothing, so a long guess is worth it; a drafting pass costs time even when it is rejected.
_FIXED_TOKENS = {"none": 0, "ngram": 8, "draft_model": 5, "self_int4": 4, "choose": 5}
_MOST_TOKENS = 16
_CHOICES: dict[str, tuple[object, ...]] = {
    "method": tuple(_KEYS),
    "policy": ("cost_model", "dynamic", "gate", "fixed"),
    "match": ("recent", "first"),
    "group_size": (32, 64, 128, 256),
    "lm_head": ("auto", "int4", "shared"),
    "bits": (4, 3, 2),
    "weights": ("int8", "int4"),
    "dtype": ("auto", "bfloat16", "float16", "float32", "float64"),
    "rejection_sample_method": ("exact", "standard", "ratio", "typical"),
}
_INTEGERS = {"num_speculative_tokens": (0, 64), "prompt_lookup_max": (1, 32), "prompt_lookup_min": (1, 32)}
_SHORT_NAMES = {"none": "none", "lookup": "ngram", "ngram": "ngram", "self-int4": "self_int4", "self_int4": "self_int4"}


@dataclass(frozen=True)
class SpecConfig:
    """A drafter, the policy that says how much it drafts, and the rule that judges its drafts; made by `parse`.

    rejection_sample_method: "exact" gives the tokens of plain decoding; "standard" (also "ratio") the same law, other
    tokens; "typical" changes the answers and needs consent.
    """

    method: str = "none"
    policy: str = "fixed"
    num_speculative_tokens: int = 0
    rejection_sample_method: str = "exact"
    model: str | None = None
    dtype: str | None = None
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    match: str = "recent"
    group_size: int = 32
    lm_head: str = "auto"
    bits: int = 4
    weights: str | None = None
    drafters: "tuple[SpecConfig, ...]" = ()

    @property
    def name(self) -> str:
        """The drafter in a few words, for people."""
        if self.method == "choose":
            return "+".join(member.name for member in self.drafters)
        short = {
            "ngram": "lookup",
            "self_int4": "self-int4" if self.bits == 4 else f"self-int{self.bits}",
            "draft_model": f"model:{self.model}" + (f"@{self.weights}" if self.weights else ""),
        }
        return short.get(self.method, self.method)

    @property
    def models(self) -> tuple[str, ...]:
        """Models that the drafters are made of."""
        return tuple(one.model for one in (self, *self.drafters) if one.model is not None)

    def as_dict(self) -> dict[str, object]:
        """What was chosen, without the keys that this method does not read."""
        given = {key: getattr(self, key) for key in (*_ANY_METHOD, *_KEYS[self.method])}
        if self.drafters:
            given["drafters"] = [member.as_dict() for member in self.drafters]
        return given

    def build(
        self, allow_lossy: bool = False, profile: "Profile | None" = None
    ) -> "tuple[Drafter, DraftPolicy, Verifier]":
        """The objects for `LLM(drafter=, policy=, verifier=)`. profile: what `paceline tune` measured.

        Raises `LossyNotAllowed` for "typical" without `allow_lossy`, and what `zoo.resolve` raises for a model.
        """
        from .policy import CostModel, Dynamic, Fixed, Gate
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
        most = self.num_speculative_tokens
        if self.method == "none" or self.policy == "fixed":
            policy: DraftPolicy = Fixed(most)
        elif self.policy == "cost_model":
            policy = CostModel(most, profile)
        else:
            policy = Dynamic(most) if self.policy == "dynamic" else Gate(Fixed(most))
        return self._drafter(), policy, verifier

    def _drafter(self) -> "Drafter":
        from .drafters import Choose, DraftModel, Plain, PromptLookup, SelfQuantized
        from .zoo import resolve

        if self.method == "ngram":
            return PromptLookup(self.prompt_lookup_max, self.prompt_lookup_min, self.match)  # type: ignore[arg-type]
        if self.method == "self_int4":
            return SelfQuantized(self.group_size, self.lm_head, self.bits)  # type: ignore[arg-type]
        if self.method == "draft_model":
            assert self.model is not None  # parse() sees to it
            return DraftModel(resolve(self.model), self.dtype, weights=self.weights)  # type: ignore[arg-type]
        if self.method == "choose":
            return Choose([member._drafter() for member in self.drafters])
        return Plain()


def parse(
    what: "str | Mapping[str, object] | None", num_speculative_tokens: int | None = None, policy: str | None = None
) -> SpecConfig:
    """Read a short name, a mapping of vLLM's keys, or such a mapping as JSON.

    Short names: none, lookup, self-int4, model:NAME, model:NAME@int4 for a draft with rounded weights, and several of
    them joined by + where the policy is to take the best. num_speculative_tokens, policy: overrule the mapping's.
    Raises `ConfigError` that lists what is known.
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
    if policy is not None:
        given["policy"] = policy
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
    if method == "choose":
        given["drafters"] = _members(given.get("drafters"))
    numbered = "num_speculative_tokens" in given or method == "none"
    chosen = given.setdefault("policy", "fixed" if numbered else "cost_model")
    given.setdefault("num_speculative_tokens", _FIXED_TOKENS[method] if chosen == "fixed" else _MOST_TOKENS)
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


def _members(given: object) -> tuple[SpecConfig, ...]:
    """The drafters to choose from; their policy and rule are those of the whole."""
    if not isinstance(given, list | tuple) or len(cast("Seq[object]", given)) < 2:
        raise ConfigError('method "choose" needs "drafters"', got=repr(given), expected="a list of two or more")
    members = tuple(parse(one) for one in cast("Seq[str | Mapping[str, object]]", given))
    for member in members:
        if member.method in ("none", "choose"):
            raise ConfigError(f'"drafters" cannot hold {member.method!r}', expected=_one_of(tuple(_FIXED_TOKENS)[1:-1]))
    return members


def _from_short_name(name: str) -> dict[str, object]:
    if "+" in name:
        return {"method": "choose", "drafters": [part.strip() for part in name.split("+")]}
    if name.startswith("model:"):
        path, _, weights = name.removeprefix("model:").partition("@")
        if not path:
            raise ConfigError(
                "the drafter names no model", got=repr(name), expected="model: and a folder, hub id or zoo name"
            )
        return {"method": "draft_model", "model": path, **({"weights": weights} if weights else {})}
    if name not in _SHORT_NAMES:
        known = ("none", "lookup", "self-int4", "model:PATH_OR_ID", "or several joined by +")
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
    elif key != "drafters" and (not isinstance(value, str) or not value):
        raise ConfigError(f"{key} is not a name", got=repr(value), expected="a non-empty string")


def _one_of(names: tuple[object, ...]) -> str:
    return "one of " + ", ".join(map(str, names))


def _meant(name: str, known: tuple[str, ...]) -> str | None:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else None
