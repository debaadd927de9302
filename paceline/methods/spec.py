"""The options of drafters: the keys in JSON, and the names on the command line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from pydantic import Field

from ..errors import ConfigError
from ..schema import checked, meant, validate
from ..system.files import read_object
from .method import Method, named
from .table import HEAD, METHODS, method_named, methods, rows

if TYPE_CHECKING:
    from ..core.interfaces import Drafter

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
    def read(cls, options: Mapping[str, object]) -> Self:
        """Read the options from JSON keys. Raises `ConfigError` for a value that is missing or wrong."""
        for field in fields(cast("Any", cls)):
            if field.default is MISSING and field.name not in options:
                raise ConfigError(f'method "{cls.method}" needs "{field.name}"', expected=cls.needs.get(field.name))
        return validate(cls, dict(options), "speculative_config")

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
    """

    model: Annotated[str, Field(min_length=1)]
    ngrams: bool = True
    needs: ClassVar[Mapping[str, str]] = {"model": "a folder or a packaged head"}

    @property
    def name(self) -> str:
        return f"head:{self.model}"

    def build(self) -> "Drafter":
        """The drafter. Raises `ConfigError` where there is no head, or one of another method."""
        from ..zoo.packaged import head_folder

        method = method_of_head(self.model)
        if method != self.method:
            raise ConfigError(
                f"the head {self.model!r} is not of the method {self.method!r}", got=repr(method), fix=self.name
            )
        options = {key: value for key, value in self.as_dict().items() if value is not None and key != "model"}
        return self.drafter(str(head_folder(self.model)), **options)

    def is_exported(self, engine: str) -> bool:
        """Whether `paceline export` writes such a head for "vLLM", "SGLang" or "llama.cpp"."""
        return engine.lower() in method_named(self.method).exports

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM and llama.cpp as a chain, once it is exported."""
        lines = {engine: ("", f"runs no {self.method} heads") for engine in ("SGLang", "llama.cpp")}
        if self.is_exported("llama.cpp"):
            folder, export = self.export("llama.cpp")
            file = folder if self.model.endswith(".gguf") else f"{folder}/draft.gguf"
            flags = f"--spec-type draft-{self.method} -md {file} --spec-draft-n-max {tokens}"
            lines["llama.cpp"] = flags, "; ".join(filter(None, ["a chain, no tree", export]))
        if self.model.endswith(".gguf"):
            return lines | dict.fromkeys(("vLLM", "SGLang"), ("", "reads no heads from GGUF"))
        if not self.is_exported("vLLM"):
            return {"vLLM": ("", f"{self.method} heads cannot be exported"), **lines}
        folder, export = self.export("vLLM")
        flags = vllm_flag(method=self.method, model=folder, num_speculative_tokens=tokens)
        return {"vLLM": (flags, "; ".join(filter(None, ["a chain, no tree", export]))), **lines}

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


def vllm_flag(**options: object) -> str:
    """The flag `--speculative-config` for vLLM."""
    return "--speculative-config " + shlex.quote(json.dumps(options))


def keys_of(kind: type[DrafterSpec]) -> tuple[str, ...]:
    """The keys that a method takes."""
    return tuple(field.name for field in fields(cast("Any", kind)))


def of_head_alone(method: str) -> dict[str, object]:
    """The options with which a drafter shows what its head can do alone, as other engines run it."""
    return {"ngrams": False} if "ngrams" in keys_of(spec_class(method)) else {}


def spec_class(method: str) -> type[DrafterSpec]:
    """The options of a method. Raises as `method_named`, and `ConfigError` for a class of another kind."""
    row = method_named(method)
    kind = named(f"{row.home}:{row.spec}")
    if not (isinstance(kind, type) and issubclass(kind, DrafterSpec)):
        expected = "a DrafterSpec"
        raise ConfigError(f"the drafter {method!r} has no options", got=f"{row.home}:{row.spec}", expected=expected)
    return kind


def usages() -> str:
    """The values of --drafter, for help and messages."""
    typed = dict.fromkeys(usage(method) for method in methods() if method != "choose")
    return ", ".join([*typed, "several joined by +"])


def usage(method: str) -> str:
    """The value of --drafter for a method."""
    return METHODS[method].usage if method in METHODS else method


def from_short_name(name: str) -> dict[str, object]:
    """JSON keys from a name on the command line. Raises `ConfigError` that lists the known drafters."""
    if "+" in name:
        return {"method": "choose", "drafters": [part.strip() for part in name.split("+")]}
    word, colon, rest = name.partition(":")
    words = {row.word: row.name for row in METHODS.values() if row.usage != HEAD}
    method = words.get(word, word)
    if ":model:" in usage(method):
        rest = rest.removeprefix("model:")
    if (method not in methods() and not (word == "head" and colon)) or method == "choose":
        known = [*words, *methods(), "head:", "model:"]
        raise ConfigError(f"unknown drafter {name!r}", expected=f"one of {usages()}", fix=meant(word + colon, known))
    if colon and not rest:
        expected = HEAD if word == "head" else usage(method)
        raise ConfigError("nothing follows the colon", got=repr(name), expected=expected)
    has_options = word != "head" and rest.partition("=")[0] in keys_of(spec_class(method))
    if colon and not has_options and (word == "head" or method_named(method).head):
        head_method = method_of_head(rest)
        if head_method != method and word != "head" and (word, head_method) != ("eagle", "eagle3"):
            message = f"the head {rest!r} is of another method"
            raise ConfigError(message, got=repr(head_method), expected=one_of([method]), fix=f"head:{rest}")
        return {"method": head_method, "model": rest}
    return {"method": method, **(_options(spec_class(method), rest) if colon else {})}


def _options(kind: type[DrafterSpec], text: str) -> dict[str, object]:
    """JSON keys from the text after the colon: the value of the first key, @weights, then ,key=value for others."""
    keys, (first, *options) = keys_of(kind), text.split(",")
    values: dict[str, object] = {}
    if "=" in first or not keys:
        options = [first, *options]
    else:
        value, _, weights = first.partition("@") if "weights" in keys else (first, "", "")
        values[keys[0]] = value
        if weights:
            values["weights"] = weights
    for option in options:
        key, equals, value = option.partition("=")
        if key not in keys or not equals:
            expected = one_of([f"{key}=" for key in keys]) if keys else "no options"
            raise ConfigError(f"unknown option of the drafter {kind.method!r}", got=repr(option), expected=expected)
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


def method_of_head(name: str) -> str:
    """The method of a folder, a GGUF file or a packaged head.

    Raises `ConfigError` if there is no head, or its method is unknown.
    """
    from ..zoo.packaged import head_folder

    folder = head_folder(name)
    if folder.suffix == ".gguf":
        from ..hf.gguf.file import read_gguf

        method: object = read_gguf(folder).architecture
    else:
        config = read_object(folder / "config.json")
        told = (row.name for row in reversed(rows()) if row.is_told_by(config))
        method = config.get("method") if "paceline_head" in config else next(told, None)
    if not any(row.name == method and _takes_heads(row) for row in rows()):
        known = one_of([row.name for row in rows() if row.head])
        raise ConfigError(f"the head {name!r} is of an unknown method", got=repr(method), expected=known)
    return str(method)


def _takes_heads(row: Method) -> bool:
    return bool(row.head or row.marks) or (row.name not in METHODS and "model" in keys_of(spec_class(row.name)))


def one_of(names: Sequence[object]) -> str:
    """The names as "one of a, b, c", for messages."""
    return "one of " + ", ".join(map(str, names))
