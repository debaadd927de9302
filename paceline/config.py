"""How to speculate: the drafter, the policy that decides how much it drafts, and the verification rule.

`parse` reads a short name, as on the command line, or keys of JSON with vLLM's names. Each drafter's own keys are the
fields of its `DrafterSpec`, see `methods.spec`. Every method also takes

policy                     "cost_model" maximises the expected speed, with up to num_speculative_tokens (16) tokens;
                           "dynamic" adapts to recent acceptance; "fixed" always drafts num_speculative_tokens, and is
                           the default where that is given
num_speculative_tokens     the depth of a draft, for trees too (SGLang: num_steps)
rejection_sample_method    "exact" gives the tokens of plain decoding; "standard" (also "ratio") the same distribution,
                           other tokens; "typical" changes the answers and needs allow_lossy
num_draft_nodes            for drafters of trees and the policy "fixed": the nodes without the root (SGLang's
                           num_draft_tokens and EAGLE's total_token also count the root: theirs is one more)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from .errors import ConfigError, LossyNotAllowed
from .methods.spec import DrafterSpec, from_short_name, keys_of, one_of, spec_class
from .methods.table import methods
from .schema import brief, checked, meant, taken_from_others, validate
from .system.files import parse_json

if TYPE_CHECKING:
    from .core.interfaces import Drafter, DraftPolicy, Verifier
    from .policy import Profile

MOST_TOKENS = 16


@checked
class _Common:
    """Keys of every method."""

    policy: Literal["cost_model", "dynamic", "fixed"] = "fixed"
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    rejection_sample_method: Literal["exact", "standard", "ratio", "typical"] = "exact"
    num_draft_nodes: Annotated[int, Field(ge=1, le=256)] | None = None


_COMMON = tuple(field.name for field in fields(cast("Any", _Common)))


@checked
class SpecConfig(_Common):
    """A drafter, its policy and its verification rule; made by `parse`. The default is plain decoding."""

    drafter: DrafterSpec = field(default_factory=lambda: spec_class("none")())

    @property
    def method(self) -> str:
        """The drafter's method."""
        return self.drafter.method

    @property
    def name(self) -> str:
        """A short name of the drafter."""
        return self.drafter.name

    @property
    def models(self) -> tuple[str, ...]:
        """Models that the drafters load, other than heads and trained weights."""
        return self.drafter.models

    def as_dict(self) -> dict[str, object]:
        """The keys, as `parse` reads them."""
        common = {key: getattr(self, key) for key in _COMMON}
        if self.drafter.tree_nodes(1) is None:
            del common["num_draft_nodes"]
        return {"method": self.method, **common, **self.drafter.as_dict()}

    def build(
        self, allow_lossy: bool = False, profile: "Profile | None" = None
    ) -> "tuple[Drafter, DraftPolicy, Verifier]":
        """The objects for `LLM(drafter=, policy=, verifier=)`. profile: what `paceline tune` measured.

        Raises `LossyNotAllowed` for "typical" without `allow_lossy`.
        """
        from .policy import CostModel, Dynamic, Fixed
        from .verify import Coupled, Ratio, Typical

        if self.rejection_sample_method == "typical":
            if not allow_lossy:
                fix = 'allow it (--allow-lossy), or use "exact" (same tokens) or "standard" (same distribution)'
                raise LossyNotAllowed('rejection_sample_method "typical" changes what the model answers', fix=fix)
            verifier: Verifier = Typical(allow_lossy=True)
        else:
            verifier = Coupled() if self.rejection_sample_method == "exact" else Ratio()
        most = self.num_speculative_tokens
        if self.method == "none" or self.policy == "fixed":
            policy: DraftPolicy = Fixed(most, self.num_draft_nodes)
        elif self.policy == "cost_model":
            policy = CostModel(most, profile)
        else:
            is_wide = (self.drafter.tree_nodes(1) or 0) > 1
            policy = Dynamic(most, num_nodes=self.drafter.tree_nodes(most) if is_wide else None)
        return self.drafter.build(), policy, verifier


def parse(
    config: "str | Mapping[str, object] | None", num_speculative_tokens: int | None = None, policy: str | None = None
) -> SpecConfig:
    """Read a short name, a mapping of JSON's keys, or such a mapping as JSON.

    Short names: none, lookup, lookahead, self-top1, self-int4, self-int4:FOLDER for one with trained weights,
    model:NAME, model:NAME@int4 for a draft with INT4 weights, model:NAME,vision=none (or own, shared) for what it sees
    of images, head:NAME for a trained head, the method of an installed drafter (with options:
    METHOD:key=value,key=value), and several of them joined by +, among which the policy chooses.

    num_speculative_tokens, policy: replace those of the mapping.

    Raises `ConfigError` that lists the known names.
    """
    if isinstance(config, str):
        is_json = config.lstrip()[:1] in ("{", "[", '"')
        values = parse_json(config, "the speculative config") if is_json else from_short_name(config)
        if not isinstance(values, dict):
            raise ConfigError("the speculative config is not a JSON object", got=type(values).__name__)
    elif isinstance(config, Mapping | None):
        values = {str(key): value for key, value in (config or {}).items()}
    else:
        raise ConfigError("this is no drafter", got=brief(config), expected="a short name or a mapping of keys")
    overruled = {"num_speculative_tokens": num_speculative_tokens, "policy": policy}
    values |= {key: value for key, value in overruled.items() if value is not None}
    kind = _kind(values)
    method = kind.method
    common = validate(_Common, {key: values[key] for key in _COMMON if key in values}, "speculative_config")
    if values and method == "none" and "method" not in values:
        expected = '"method", or "model" for a draft model'
        raise ConfigError("the speculative config names no drafter", got=", ".join(values), expected=expected)
    own = {key: values[key] for key in keys_of(kind) if key in values}
    drafter = kind(drafters=_members(own.get("drafters"))) if method == "choose" else kind.read(own)  # type: ignore[call-arg]
    numbered = "num_speculative_tokens" in values or method == "none"
    chosen = common.policy if "policy" in values else "fixed" if numbered else "cost_model"
    most = kind.tokens if chosen == "fixed" else MOST_TOKENS
    most = common.num_speculative_tokens if "num_speculative_tokens" in values else most
    if method != "none" and most == 0:
        message, fix = "num_speculative_tokens is 0, which drafts nothing", 'use method "none" for that'
        raise ConfigError(message, expected="at least 1", fix=fix)
    nodes = _num_nodes(common.num_draft_nodes, drafter, chosen, most)
    return SpecConfig(chosen, most, common.rejection_sample_method, nodes, drafter)


def _kind(values: dict[str, object]) -> type[DrafterSpec]:
    """The options of the method in `values`, from which keys without a value are removed.

    Raises `ConfigError` for an unknown method or key.
    """
    method = values.get("method")
    if method is None:
        method = "draft_model" if values.get("model") is not None else "none"
    if not isinstance(method, str) or method not in methods():
        fix = meant(method, methods()) if isinstance(method, str) else None
        message = "speculative_config: method has a wrong value"
        raise ConfigError(message, got=brief(method), expected=one_of(methods()), fix=fix)
    kind = spec_class(method)
    takes = ("method", *_COMMON, *keys_of(kind))
    known = {*takes, *(key for name in methods() for key in keys_of(spec_class(name)))}
    for key in [key for key in values if values[key] is None and key in known]:
        del values[key]
    if others := {key: values.pop(key) for key in [*values] if key not in known}:
        taken_from_others("speculative_config", others, takes)
    for key in values:
        if key not in takes:
            raise ConfigError(f"method {method!r} does not take {key!r}", expected=one_of(takes))
    return kind


def _members(configs: object) -> tuple[DrafterSpec, ...]:
    """The drafters of "choose"; they share its policy and verification rule."""
    if not isinstance(configs, list | tuple) or len(cast("Sequence[object]", configs)) < 2:
        raise ConfigError('method "choose" needs "drafters"', got=brief(configs), expected="a list of two or more")
    members = list[DrafterSpec]()
    for config in cast("Sequence[str | Mapping[str, object]]", configs):
        # A nested "choose" is refused without reading it, since it may be nested deeply.
        chooses = isinstance(config, Mapping) and config.get("method") == "choose"
        member = None if chooses else parse(config).drafter
        if member is None or member.method in ("none", "choose"):
            got = "choose" if member is None else member.method
            expected = one_of([method for method in methods() if method not in ("none", "choose")])
            raise ConfigError(f'"drafters" cannot hold {got!r}', expected=expected)
        members.append(member)
    return tuple(members)


def _num_nodes(number: int | None, drafter: DrafterSpec, policy: str, depth: int) -> int | None:
    """Nodes of a tree. Raises `ConfigError` for a number that would have no effect."""
    counts, usual = policy == "fixed", drafter.tree_nodes(depth)
    if number is None:
        return usual if counts else None
    if not counts:
        fix = 'leave "num_draft_nodes" out, or say "fixed"'
        raise ConfigError(f'the policy "{policy}" chooses the number of nodes itself', fix=fix)
    if usual is None:
        raise ConfigError("num_draft_nodes is for drafters of trees", got=drafter.method, fix="leave it out")
    if number < depth:
        message = "num_draft_nodes is below num_speculative_tokens, the depth"
        raise ConfigError(message, got=f"{number} and {depth}", expected="at least one node a level")
    return number


_ENGINES = ("vLLM", "SGLang", "llama.cpp")


@dataclass(frozen=True)
class EngineFlags:
    """Options for the start command of one engine, and a remark on what is different or missing there; "" for none."""

    engine: str
    flags: str
    remark: str = ""


def engine_flags(
    config: SpecConfig, num_tokens: Mapping[str, int], alone: Sequence[SpecConfig] = ()
) -> list[EngineFlags]:
    """The same drafter as options of vLLM 0.32, SGLang 0.5.23 and llama.cpp of 2026, which draft a fixed number.

    num_tokens: how many to draft, by the drafter's name in results (lookup, self-int4, draft_model). alone: single
    drafters that are faster than plain decoding, the best first; engines without combinations get the first they have.
    """
    if config.method == "none":
        remark = "no drafter pays here: start it without speculation"
        return [EngineFlags(engine, "", remark) for engine in _ENGINES]

    def elsewhere(drafter: DrafterSpec, engine: str) -> tuple[str, str]:
        tokens = max(1, num_tokens.get(drafter.label or drafter.method, 5))
        return drafter.elsewhere(tokens).get(engine, ("", f"has no {drafter.method}"))

    tried, flags = alone if config.method == "choose" else (config,), list[EngineFlags]()
    for engine in _ENGINES:
        rows = [(c.name, *elsewhere(c.drafter, engine)) for c in tried] or [("", "", "no drafter pays by itself")]
        name, its_flags, remark = next((row for row in rows if row[1]), rows[0])
        if its_flags and config.method == "choose":
            remark = f"{name} alone" + (f"; {remark}" if remark else "")
        flags.append(EngineFlags(engine, its_flags, remark))
    return flags
