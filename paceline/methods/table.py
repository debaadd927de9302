"""The drafters by method, with their options: the keys in JSON and the name on the command line.

CONTRIBUTING.md explains how to add one. The module of a drafter is imported when it is first used.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import Field

from ..errors import ConfigError
from ..schema import checked, meant, validate

if TYPE_CHECKING:
    from ..core.interfaces import Drafter


@dataclass(frozen=True)
class Registered:
    """One row of the registry.

    home: the module and class of the `DrafterSpec`.
    usage: the value of --drafter.
    """

    home: str
    usage: str
    summary: str


_HEAD = "head:PATH_OR_NAME"
REGISTRY: dict[str, Registered] = {
    "none": Registered(".plain:PlainSpec", "none", "plain decoding, without drafts"),
    "ngram": Registered(".lookup:LookupSpec", "lookup", "prompt lookup: what followed the same words before"),
    "suffix": Registered(
        ".suffix.drafter:SuffixSpec",
        "suffix[:CORPUS]",
        "suffix decoding: all that followed the same words before, as a tree",
    ),
    "prediction": Registered(
        ".prediction:PredictedOutputSpec", "prediction", "Predicted Outputs: the answer that a request predicts"
    ),
    "token_recycling": Registered(
        ".recycling:RecyclingSpec", "recycling", "Token Recycling: a tree of what the model found likely before"
    ),
    "jump_forward": Registered(
        ".jump_forward:JumpForwardSpec", "jump-forward", "jump-forward: what structured_outputs leave no choice about"
    ),
    "lookahead": Registered(
        ".lookahead:LookaheadSpec", "lookahead", "Lookahead decoding: n-grams from a window beside each pass"
    ),
    "self_int4": Registered(".self_int4.drafter:SelfInt4Spec", "self-int4[:FOLDER]", "the model itself in INT4"),
    "draft_model": Registered(
        ".draft_model.drafter:DraftModelSpec", "model:PATH_OR_ID[@int4]", "draft model: a smaller model"
    ),
    "ouroboros": Registered(
        ".ouroboros:OuroborosSpec",
        "ouroboros:model:PATH_OR_ID[@int4]",
        "Ouroboros: a smaller model, and phrases of its rejected drafts",
    ),
    "eagle": Registered(".eagle.drafter:EagleSpec", _HEAD, "EAGLE-1 or 2: one layer over the last hidden states"),
    "eagle3": Registered(
        ".eagle.drafter:Eagle3Spec", _HEAD, "EAGLE-3: one layer over the hidden states of three depths"
    ),
    "peagle": Registered(
        ".eagle.drafter:PEagleSpec", _HEAD, "P-EAGLE: EAGLE-3's layer, which drafts all tokens in one pass"
    ),
    "dflash": Registered(".dflash.drafter:DFlashSpec", _HEAD, "DFlash: a few layers, which draft a block in one pass"),
    "mtp": Registered(
        ".eagle.drafter:MtpSpec", _HEAD, "MTP: one layer over the last hidden states, in DeepSeek-V3's form"
    ),
    "medusa": Registered(".parallel.drafter:MedusaSpec", _HEAD, "Medusa: a tree from parallel heads"),
    "blockwise": Registered(
        ".parallel.drafter:BlockwiseSpec", _HEAD, "blockwise decoding: a chain from parallel heads"
    ),
    "space": Registered(".space.drafter:SpaceSpec", _HEAD, "SPACE: mask tokens in the model's own pass"),
    "choose": Registered(".choose:ChooseSpec", "DRAFTER+DRAFTER", "the best of several, per request and round"),
}
_ALIASES = {
    "lookup": "ngram",
    "recycling": "token_recycling",
    "jump-forward": "jump_forward",
    "self-int4": "self_int4",
    "model": "draft_model",
}
_HEADS = ("eagle", "eagle3", "peagle", "dflash", "medusa", "blockwise", "mtp", "space", "self_int4")
"""Methods whose weights are a folder."""

RECIPES = {
    "eagle": "eagle.recipe:EagleRecipe",
    "eagle3": "eagle.recipe:EagleRecipe",
    "peagle": "eagle.recipe:EagleRecipe",
    "dflash": "dflash.recipe:DFlashRecipe",
    "medusa": "parallel.recipe:ParallelRecipe",
    "blockwise": "parallel.recipe:ParallelRecipe",
    "mtp": "eagle.recipe:EagleRecipe",
    "space": "space.recipe:SpaceRecipe",
    "qat": "self_int4.recipe:QatRecipe",
    "distill": "draft_model.recipe:DistillRecipe",
}
"""The module and class of the recipe that trains each method."""

TREE_NODES = 24
"""Nodes of a tree where no policy chooses their number."""


class DrafterSpec:
    """The options of a drafter. Subclasses are checked dataclasses (`schema.checked`) whose fields are keys of JSON.

    method: the name in JSON.
    label: the name in results, if it is a different one.
    drafter: the class that `build` instantiates with the options that are not None.
    tokens: how many tokens the policy "fixed" drafts by default.
    needs: descriptions of the required keys, for messages.
    draws_tree: whether it drafts trees of `TREE_NODES` nodes.
    """

    method: ClassVar[str]
    label: ClassVar[str] = ""
    drafter: ClassVar[Any]
    tokens: ClassVar[int] = 5
    needs: ClassVar[Mapping[str, str]] = {}
    draws_tree: ClassVar[bool] = False

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Read the options from JSON keys. Raises `ConfigError` for a value that is missing or wrong."""
        for field in fields(cast("Any", cls)):
            if field.default is MISSING and field.name not in given:
                raise ConfigError(f'method "{cls.method}" needs "{field.name}"', expected=cls.needs.get(field.name))
        return validate(cls, dict(given), "speculative_config")

    @property
    def name(self) -> str:
        """A short name of the drafter with its options; as on the command line, if possible."""
        return self.label or self.method

    @property
    def parts(self) -> "tuple[DrafterSpec, ...]":
        """The members of a combined drafter; for any other drafter, itself."""
        return (self,)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it loads, without heads and trained weights."""
        return ()

    def tree_nodes(self, depth: int) -> int | None:
        """The default number of nodes of a tree of this depth, without the root; None if it drafts chains."""
        return max(TREE_NODES, depth) if self.draws_tree else None

    def as_dict(self) -> dict[str, object]:
        return {key: getattr(self, key) for key in keys_of(type(self))}

    def build(self) -> "Drafter":
        return self.drafter(**{key: value for key, value in self.as_dict().items() if value is not None})

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """The flags ("" for none) and a remark for the same drafter in "vLLM", "SGLang" and "llama.cpp"."""
        return {}


@checked
class HeadSpec(DrafterSpec):
    """A drafter whose weights `paceline train` wrote or others published.

    model: the folder or packaged name of the weights.
    exported: the engines for which `paceline export` writes them.
    """

    model: Annotated[str, Field(min_length=1)]
    ngrams: bool = True
    needs: ClassVar[Mapping[str, str]] = {"model": "a folder or a packaged head"}
    exported: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        return f"head:{self.model}"

    def build(self) -> "Drafter":
        """The drafter. Raises `ConfigError` where there is no head, or one of another method."""
        from ..zoo.packaged import head_folder

        found = method_of_head(self.model)
        if found != self.method:
            raise ConfigError(
                f"the head {self.model!r} is not of the method {self.method!r}", got=repr(found), fix=self.name
            )
        options = {key: value for key, value in self.as_dict().items() if value is not None and key != "model"}
        return self.drafter(str(head_folder(self.model)), **options)

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM and llama.cpp as a chain, once it is exported."""
        found = {engine: ("", f"runs no {self.method} heads") for engine in ("SGLang", "llama.cpp")}
        if "llama.cpp" in self.exported:
            folder, export = self.export("llama.cpp")
            file = folder if self.model.endswith(".gguf") else f"{folder}/draft.gguf"
            flags = f"--spec-type draft-{self.method} -md {file} --spec-draft-n-max {tokens}"
            found["llama.cpp"] = flags, "; ".join(filter(None, ["a chain, no tree", export]))
        if self.model.endswith(".gguf"):
            return found | dict.fromkeys(("vLLM", "SGLang"), ("", "reads no heads from GGUF"))
        if "vLLM" not in self.exported:
            return {"vLLM": ("", f"{self.method} heads cannot be exported"), **found}
        folder, export = self.export("vLLM")
        flags = vllm_flag(method=self.method, model=folder, num_speculative_tokens=tokens)
        return {"vLLM": (flags, "; ".join(filter(None, ["a chain, no tree", export]))), **found}

    def export(self, engine: str) -> tuple[str, str]:
        """The folder of the export for an engine and the command that makes it; a published head needs no export."""
        from ..zoo.packaged import published_head

        if self.model.endswith(".gguf"):
            return shlex.quote(self.model), ""
        if published := published_head(self.model):
            if engine == "llama.cpp":
                return "MODEL", f"first: llama.cpp's convert_hf_to_gguf.py {shlex.quote(str(published))}"
            return shlex.quote(str(published)), ""
        folder, to = shlex.quote(f"{self.model.rstrip('/').rsplit('/', 1)[-1]}-{engine.lower()}"), engine.lower()
        return folder, f"first: paceline export {shlex.quote(self.model)} {folder} --to {to} --model MODEL"


def vllm_flag(**given: object) -> str:
    """The flag `--speculative-config` for vLLM."""
    return "--speculative-config " + shlex.quote(json.dumps(given))


def keys_of(kind: type[DrafterSpec]) -> tuple[str, ...]:
    """The keys that a method takes."""
    return tuple(field.name for field in fields(cast("Any", kind)))


def of_head_alone(method: str) -> dict[str, object]:
    """The options with which a drafter shows what its head can do alone, as other engines run it."""
    return {"ngrams": False} if "ngrams" in keys_of(spec_class(method)) else {}


def methods() -> tuple[str, ...]:
    """All methods: ours first, then those of installed packages."""
    return tuple(dict.fromkeys([*REGISTRY, *_installed()]))


def spec_class(method: str) -> type[DrafterSpec]:
    """The options of a method. Raises `ConfigError` for an entry point that cannot be loaded."""
    if method in REGISTRY:
        module, name = REGISTRY[method].home.split(":")
        return getattr(import_module(module, __package__), name)
    entry = _installed()[method]
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(f"the drafter {method!r} cannot be loaded", got=repr(error), fix=entry.value) from error
    if not (isinstance(kind, type) and issubclass(kind, DrafterSpec)):
        raise ConfigError(f"the drafter {method!r} has no options", got=entry.value, expected="a DrafterSpec")
    return kind


def recipe_of(method: str) -> Any:
    """The `train.recipe.Recipe` of a method. Raises `ConfigError` for an unknown one."""
    if method not in RECIPES:
        raise ConfigError("unknown method of training", got=repr(method), expected="one of " + ", ".join(RECIPES))
    module, _, name = RECIPES[method].partition(":")
    return getattr(import_module(f".{module}", __package__), name)


def table() -> list[tuple[str, str, str]]:
    """Usage, method and summary of every drafter."""
    own = {method: row.summary for method, row in REGISTRY.items()}
    others = {method: (spec_class(method).__doc__ or "").partition("\n")[0] for method in _installed()}
    return [(usage(method), method, summary) for method, summary in (own | others).items()]


def usages() -> str:
    """The values of --drafter, for help and messages."""
    typed = dict.fromkeys(usage(method) for method in methods() if method != "choose")
    return ", ".join([*typed, "several joined by +"])


def usage(method: str) -> str:
    """The value of --drafter for a method."""
    return REGISTRY[method].usage if method in REGISTRY else method


def from_short_name(name: str) -> dict[str, object]:
    """JSON keys from a name on the command line. Raises `ConfigError` that lists the known drafters."""
    if "+" in name:
        return {"method": "choose", "drafters": [part.strip() for part in name.split("+")]}
    word, colon, rest = name.partition(":")
    method = _ALIASES.get(word, word)
    if method == "ouroboros":
        rest = rest.removeprefix("model:")
    if (method not in methods() and not (word == "head" and colon)) or method == "choose":
        known = [*_ALIASES, *methods(), "head:", "model:"]
        raise ConfigError(f"unknown drafter {name!r}", expected=f"one of {usages()}", fix=meant(word + colon, known))
    if colon and not rest:
        raise ConfigError(
            "nothing follows the colon", got=repr(name), expected=_HEAD if word == "head" else usage(method)
        )
    if colon and (word == "head" or method in _HEADS):
        allowed = {"head": methods(), "eagle": ("eagle", "eagle3")}.get(word, (method,))
        if (found := method_of_head(rest)) not in allowed:
            raise ConfigError(
                f"the head {rest!r} is of another method",
                got=repr(found),
                expected=one_of(allowed),
                fix=f"head:{rest}",
            )
        return {"method": found, "model": rest}
    return {"method": method, **(_options(spec_class(method), rest) if colon else {})}


def _options(kind: type[DrafterSpec], text: str) -> dict[str, object]:
    """JSON keys from the text after the colon: the value of the first key, @weights, then ,key=value for others."""
    keys, (first, *options) = keys_of(kind), text.split(",")
    given: dict[str, object] = {}
    if "=" in first or not keys:
        options = [first, *options]
    else:
        value, _, weights = first.partition("@") if "weights" in keys else (first, "", "")
        given[keys[0]] = value
        if weights:
            given["weights"] = weights
    for option in options:
        key, equals, value = option.partition("=")
        if key not in keys or not equals:
            expected = one_of([f"{key}=" for key in keys]) if keys else "no options"
            raise ConfigError(f"unknown option of the drafter {kind.method!r}", got=repr(option), expected=expected)
        try:
            given[key] = json.loads(value)
        except ValueError:
            given[key] = value
    return given


def method_of_head(name: str) -> str:
    """The method of a folder or packaged head. Raises `ConfigError` if there is no head, or its method is unknown."""
    from ..zoo.packaged import head_method

    method = head_method(name)
    if method not in _HEADS and not (method in _installed() and "model" in keys_of(spec_class(method))):
        raise ConfigError(f"the head {name!r} is of an unknown method", got=repr(method), expected=one_of(_HEADS))
    return method


def one_of(names: Sequence[object]) -> str:
    """The names as "one of a, b, c", for messages."""
    return "one of " + ", ".join(map(str, names))


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="paceline.methods") if entry.name not in REGISTRY}
