"""How to speculate, in words: vLLM's `speculative_config` keys and ours, and the short names of the command line.

method           keys it takes, besides policy, num_speculative_tokens and rejection_sample_method    fixed tokens
none                                                                                                  0
ngram            prompt_lookup_max, prompt_lookup_min, match                                          8
draft_model      model, dtype, weights, vision                                                        5
self_int4        group_size, lm_head, bits; or model (a folder of trained weights), lm_head            4
eagle, eagle3    model (a head: a folder or a packaged name), tree, top_k, num_draft_nodes            5, in 24 nodes
medusa           model, top_k, num_draft_nodes                                                        4, in 24 nodes
blockwise, mtp   model                                                                                4 and 3
space            model (an adapter: a folder or a packaged name), top_k, num_draft_nodes              3, in 3 nodes
choose           drafters: a list of such configurations, of which the policy takes the best          5

tree: "dynamic" (EAGLE-2), "static" (EAGLE-1) or "chain". num_draft_nodes: all nodes of a tree but its root, for the
policies that do not choose them; num_speculative_tokens is its depth. Where such a number is for several drafters or
grows by itself (choose, "dynamic"), SPACE drafts no more than fit with their masks into 64 rows of a pass.

policy: "cost_model" drafts what pays on this machine for this text, up to num_speculative_tokens (16); "dynamic" and
"gate" adapt by simpler rules; "fixed" always drafts as many. A number without a policy means "fixed".
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from .errors import ConfigError, LossyNotAllowed
from .schema import Many, brief, checked, validate
from .spec_words import (
    ANY_METHOD,
    EAGLE,
    FEW_NODES,
    FIXED_NODES,
    FIXED_TOKENS,
    HEADS,
    KEYS,
    MOST_TOKENS,
    TREES,
    from_json,
    from_short_name,
    method_of_head,
    one_of,
)

if TYPE_CHECKING:
    from .core.interfaces import Drafter, DraftPolicy, Verifier
    from .policy import Profile

SPACE_ROWS = 64
"""Rows of a pass that SPACE may fill where nodes are counted without their masks."""

_Method = Literal[
    "none", "ngram", "draft_model", "self_int4", "eagle", "eagle3", "medusa", "blockwise", "mtp", "space", "choose"
]
_Ngram = Annotated[int, Field(ge=1, le=32)]


@checked
class SpecConfig:
    """A drafter, the policy that says how much it drafts, and the rule that judges its drafts; made by `parse`.

    rejection_sample_method: "exact" gives the tokens of plain decoding; "standard" (also "ratio") the same law, other
    tokens; "typical" changes the answers and needs consent.
    """

    method: _Method = "none"
    policy: Literal["cost_model", "dynamic", "gate", "fixed"] = "fixed"
    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    rejection_sample_method: Literal["exact", "standard", "ratio", "typical"] = "exact"
    model: Annotated[str, Field(min_length=1)] | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] | None = None
    prompt_lookup_max: _Ngram = 3
    prompt_lookup_min: _Ngram = 1
    match: Literal["recent", "first"] = "recent"
    group_size: Literal[32, 64, 128, 256] = 32
    lm_head: Literal["auto", "int4", "shared"] = "auto"
    bits: Literal[4, 3, 2] = 4
    weights: Literal["int8", "int4"] | None = None
    vision: Literal["own", "shared", "none"] | None = None
    tree: Literal["dynamic", "static", "chain"] | None = None
    top_k: Annotated[int, Field(ge=1, le=64)] | None = None
    num_draft_nodes: Annotated[int, Field(ge=1, le=256)] | None = None
    drafters: "Many[SpecConfig]" = ()

    @property
    def name(self) -> str:
        """The drafter in a few words, for people."""
        if self.method == "choose":
            return "+".join(member.name for member in self.drafters)
        if self.method in HEADS:
            return f"head:{self.model}"
        if self.method == "self_int4" and self.model is not None:
            return f"self-int4:{self.model}"
        short = {
            "ngram": "lookup",
            "self_int4": "self-int4" if self.bits == 4 else f"self-int{self.bits}",
            "draft_model": f"model:{self.model}"
            + (f"@{self.weights}" if self.weights else "")
            + (f",vision={self.vision}" if self.vision else ""),
        }
        return short.get(self.method, self.method)

    @property
    def models(self) -> tuple[str, ...]:
        """Models that the drafters are made of; heads and trained weights are no models."""
        return tuple(one.model for one in (self, *self.drafters) if one.model and one.method == "draft_model")

    @property
    def is_tree(self) -> bool:
        """Whether it drafts trees."""
        return self.method in TREES and self.tree != "chain"

    @property
    def is_wide(self) -> bool:
        """Whether its trees have more nodes than levels where no policy chooses their number."""
        return self.is_tree and self.method not in FEW_NODES

    def as_dict(self) -> dict[str, object]:
        """What was chosen, without the keys that this method does not read."""
        unread = ("group_size", "bits") if self.method == "self_int4" and self.model else ()
        given = {key: getattr(self, key) for key in (*ANY_METHOD, *KEYS[self.method]) if key not in unread}
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
            policy: DraftPolicy = Fixed(most, self.num_draft_nodes)
        elif self.policy == "cost_model":
            policy = CostModel(most, profile)
        else:
            nodes = max(FIXED_NODES, most) if any(one.is_wide for one in (self, *self.drafters)) else None
            gated = Fixed(most, self.num_draft_nodes)
            policy = Dynamic(most, num_nodes=nodes) if self.policy == "dynamic" else Gate(gated)
        counts_nodes = self.policy != "cost_model" and (self.method == "choose" or self.policy == "dynamic")
        return self._drafter(SPACE_ROWS if counts_nodes else None), policy, verifier

    def _drafter(self, space_rows: int | None) -> "Drafter":
        from .drafters import Choose, DraftModel, Plain, PromptLookup, SelfQuantized
        from .zoo import resolve
        from .zoo.packaged import head_folder

        if self.method in HEADS:
            return self._head_drafter(space_rows)
        if self.method == "ngram":
            return PromptLookup(self.prompt_lookup_max, self.prompt_lookup_min, self.match)
        if self.method == "self_int4":
            folder = None if self.model is None else str(head_folder(self.model))
            return SelfQuantized(self.group_size, self.lm_head, self.bits, folder)
        if self.method == "draft_model":
            assert self.model is not None  # parse() sees to it
            return DraftModel(resolve(self.model), self.dtype, None, self.weights, self.vision)
        if self.method == "choose":
            return Choose([member._drafter(space_rows) for member in self.drafters])
        return Plain()

    def _head_drafter(self, space_rows: int | None) -> "Drafter":
        from .drafters.eagle import Eagle
        from .drafters.heads import Blockwise, Medusa
        from .drafters.mtp import Mtp
        from .drafters.space import Space
        from .zoo.packaged import head_folder

        assert self.model is not None  # parse() sees to it
        folder, found = str(head_folder(self.model)), method_of_head(self.model)
        if found != self.method:
            raise ConfigError(
                f"the head {self.model!r} is not of the method {self.method!r}", got=repr(found), fix=self.name
            )
        most = {} if self.top_k is None else {"top_k": self.top_k}
        if self.method in EAGLE:
            return Eagle(folder, tree=self.tree or "dynamic", **most)
        if self.method == "medusa":
            return Medusa(folder, **most)
        if self.method == "space":
            return Space(folder, max_rows=space_rows, **most)
        return Blockwise(folder) if self.method == "blockwise" else Mtp(folder)


def parse(
    what: "str | Mapping[str, object] | None", num_speculative_tokens: int | None = None, policy: str | None = None
) -> SpecConfig:
    """Read a short name, a mapping of vLLM's keys, or such a mapping as JSON.

    Short names: none, lookup, self-int4, self-int4:FOLDER for one with trained weights, model:NAME, model:NAME@int4 for
    a draft with rounded weights, model:NAME,vision=none (or own, shared) for what it sees of pictures, head:NAME for a
    trained head, and several of them joined by + where the policy is to take the best. num_speculative_tokens, policy:
    overrule the mapping's.
    Raises `ConfigError` that lists what is known.
    """
    if isinstance(what, str):
        given = from_json(what) if what.lstrip()[:1] in ("{", "[", '"') else from_short_name(what)
    elif isinstance(what, Mapping | None):
        given = dict(what or {})
    else:
        raise ConfigError("this names no drafter", got=brief(what), expected="a short name or a mapping of keys")
    overruled = {"num_speculative_tokens": num_speculative_tokens, "policy": policy}
    given |= {key: value for key, value in overruled.items() if value is not None}
    given = {key: value for key, value in given.items() if value is not None or key not in SpecConfig.__annotations__}
    given.setdefault("method", "draft_model" if "model" in given else "none")
    members = given.pop("drafters", None)
    read = validate(SpecConfig, given, "speculative_config")
    method, given = read.method, {key: getattr(read, key) for key in given}
    if members is not None:
        given["drafters"] = members
    for key in given:
        if key not in (*ANY_METHOD, *KEYS[method]):
            raise ConfigError(f"method {method!r} does not take {key!r}", expected=one_of((*ANY_METHOD, *KEYS[method])))
    if (
        method == "self_int4"
        and "model" in given
        and (extra := [key for key in ("group_size", "bits") if key in given])
    ):
        raise ConfigError(f"trained weights have their own {' and '.join(extra)}", fix="leave it out, or the model")
    if "model" in KEYS[method] and "model" not in given and method != "self_int4":
        told = "a folder, a hub id or a name of the zoo" if method == "draft_model" else "a folder or a packaged head"
        raise ConfigError(f'method "{method}" needs "model"', expected=told)
    if method == "choose":
        given["drafters"] = _members(given.get("drafters"))
    numbered = "num_speculative_tokens" in given or method == "none"
    chosen = given.setdefault("policy", "fixed" if numbered else "cost_model")
    given.setdefault("num_speculative_tokens", FIXED_TOKENS[method] if chosen == "fixed" else MOST_TOKENS)
    if method != "none" and given["num_speculative_tokens"] == 0:
        raise ConfigError(
            "num_speculative_tokens is 0, which drafts nothing", expected="at least 1", fix='use method "none" for that'
        )
    _shape_tree(given, method)
    config = SpecConfig(**given)  # type: ignore[arg-type]
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            "prompt_lookup_min is above prompt_lookup_max",
            got=f"{config.prompt_lookup_min} and {config.prompt_lookup_max}",
            expected="min <= max",
        )
    return config


def _members(given: object) -> tuple[SpecConfig, ...]:
    """The drafters to choose from; their policy and rule are those of the whole."""
    if not isinstance(given, list | tuple) or len(cast("Seq[object]", given)) < 2:
        raise ConfigError('method "choose" needs "drafters"', got=brief(given), expected="a list of two or more")
    members = tuple(
        SpecConfig("choose") if isinstance(one, Mapping) and one.get("method") == "choose" else parse(one)
        for one in cast("Seq[str | Mapping[str, object]]", given)  # one in another is not opened: it may be deep
    )
    for member in members:
        if member.method in ("none", "choose"):
            raise ConfigError(f'"drafters" cannot hold {member.method!r}', expected=one_of(tuple(FIXED_TOKENS)[1:-1]))
    return members


def _shape_tree(given: dict[str, object], method: _Method) -> None:
    """Fill in the shape of a tree. Raises `ConfigError` for keys that would be of no effect."""
    if method in EAGLE:
        given.setdefault("tree", "dynamic")
    tree, policy = given.get("tree", "dynamic"), given["policy"]
    if tree != "dynamic" and "top_k" in given:
        raise ConfigError(f'a "{tree}" tree does not take "top_k"', fix='leave it out, or say "tree": "dynamic"')
    depth = cast("int", given["num_speculative_tokens"])
    members = cast("tuple[SpecConfig, ...]", given.get("drafters", ()))
    drawn = (SpecConfig(method, tree=cast("Any", given.get("tree"))), *members)
    if "num_draft_nodes" not in given:
        if any(one.is_tree for one in drawn) and policy in ("fixed", "gate"):
            given["num_draft_nodes"] = max(FIXED_NODES, depth) if any(one.is_wide for one in drawn) else depth
        return
    if policy not in ("fixed", "gate"):
        raise ConfigError(
            f'the policy "{policy}" chooses the number of nodes itself',
            fix='leave "num_draft_nodes" out, or say "fixed"',
        )
    if not any(one.is_tree for one in drawn):
        raise ConfigError("this drafts no tree, so that num_draft_nodes means nothing", fix="leave it out")
    if cast("int", given["num_draft_nodes"]) < depth:
        raise ConfigError(
            "num_draft_nodes is below num_speculative_tokens, the depth",
            got=f"{given['num_draft_nodes']} and {depth}",
            expected="at least one node a level",
        )
