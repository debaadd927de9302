"""The words of `spec_config`: methods, their keys and the values these take, short names, and how a wrong word is told.

Names are vLLM's where it has them. num_speculative_tokens is the depth of a draft, for trees too (SGLang:
num_steps); num_draft_nodes counts all nodes of a tree but its root (SGLang's num_draft_tokens and EAGLE's total_token
count the root, so theirs is one more); top_k is the most children of a node (EAGLE's top_k, SGLang's eagle_topk).
"""

from typing import cast

from .errors import ConfigError
from .schema import meant
from .system.files import parse_json

ANY_METHOD = ("method", "policy", "num_speculative_tokens", "rejection_sample_method")
EAGLE = ("eagle", "eagle3")
TREES = (*EAGLE, "medusa", "space")
HEADS = (*TREES, "blockwise", "mtp")
# A self-draft is no head, but its weights may be trained and then lie in a folder as heads do.
TRAINED = (*HEADS, "self_int4")
KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min", "match"),
    "draft_model": ("model", "dtype", "weights", "vision"),
    "self_int4": ("model", "group_size", "lm_head", "bits"),
    "eagle": ("model", "tree", "top_k", "num_draft_nodes"),
    "eagle3": ("model", "tree", "top_k", "num_draft_nodes"),
    "medusa": ("model", "top_k", "num_draft_nodes"),
    "blockwise": ("model",),
    "mtp": ("model",),
    "space": ("model", "top_k", "num_draft_nodes"),
    "choose": ("drafters", "num_draft_nodes"),
}
# Copying costs nothing, so a long guess is worth it; a drafting pass costs time even when it is rejected.
FIXED_TOKENS = {
    **{"none": 0, "ngram": 8, "draft_model": 5, "self_int4": 4},
    **{"eagle": 5, "eagle3": 5, "medusa": 4, "blockwise": 4, "mtp": 3, "space": 3, "choose": 5},
}
FIXED_NODES = 24
# Of SPACE each node brings mask tokens of its own: a fixed tree has as many nodes as a chain.
FEW_NODES = ("space",)
MOST_TOKENS = 16
_SHORT_NAMES = {"none": "none", "lookup": "ngram", "ngram": "ngram", "self-int4": "self_int4", "self_int4": "self_int4"}
_PREFIXES = ("model:", "head:", "eagle:", "space:", "self-int4:")


def from_json(text: str) -> dict[str, object]:
    """A configuration written as JSON."""
    try:
        value = parse_json(text, "the speculative config")
    except ConfigError as error:
        example = """for example {"method": "ngram", "num_speculative_tokens": 8}"""
        raise ConfigError(error.what, got=error.got, expected=example) from error
    if not isinstance(value, dict):
        raise ConfigError("the speculative config is not a JSON object", got=type(value).__name__)
    return cast("dict[str, object]", value)


def from_short_name(name: str) -> dict[str, object]:
    """A configuration named as on the command line; the method of a head is read from its config.json."""
    if "+" in name:
        return {"method": "choose", "drafters": [part.strip() for part in name.split("+")]}
    prefix, colon, rest = name.partition(":")
    if prefix + colon in _PREFIXES:
        if not rest:
            what = "model" if prefix == "model" else "head"
            expected = "a folder, hub id or zoo name" if what == "model" else "a folder or a packaged head"
            raise ConfigError(f"the drafter names no {what}", got=repr(name), expected=f"{prefix}: and {expected}")
        allowed = {"eagle": EAGLE, "space": ("space",), "self-int4": ("self_int4",)}.get(prefix, TRAINED)
        return _draft_model(rest) if prefix == "model" else _head(rest, allowed)
    if name not in _SHORT_NAMES:
        known = (
            "none",
            "lookup",
            "self-int4",
            "self-int4:PATH",
            "model:PATH_OR_ID",
            "head:PATH_OR_NAME",
            "several joined by +",
        )
        fix = meant(name, (*_SHORT_NAMES, *_PREFIXES))
        raise ConfigError(f"unknown drafter {name!r}", expected=one_of(known), fix=fix)
    return {"method": _SHORT_NAMES[name]}


def _draft_model(name: str) -> dict[str, object]:
    name, comma, option = name.partition(",")
    key, _, vision = option.partition("=")
    if comma and key != "vision":
        raise ConfigError("unknown option of a draft", got=repr(option), expected="vision=own, shared or none")
    path, _, weights = name.partition("@")
    given = {"method": "draft_model", "model": path, "weights": weights, "vision": vision}
    return {word: value for word, value in given.items() if value or (comma and word == "vision")}


def _head(name: str, allowed: tuple[str, ...]) -> dict[str, object]:
    method = method_of_head(name)
    if method not in allowed:
        raise ConfigError(
            f"the head {name!r} is not of such a method", got=repr(method), expected=one_of(allowed), fix=f"head:{name}"
        )
    return {"method": method, "model": name}


def method_of_head(name: str) -> str:
    """The method of a folder or packaged head. Raises `ConfigError` where there is none, or of a method not known."""
    from .zoo.packaged import head_method

    method = head_method(name)
    if method not in TRAINED:
        raise ConfigError(f"the head {name!r} is of an unknown method", got=repr(method), expected=one_of(TRAINED))
    return method


def one_of(names: tuple[object, ...]) -> str:
    """The names, for a message."""
    return "one of " + ", ".join(map(str, names))
