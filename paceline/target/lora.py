"""The LoRA adapters of a model, by name. A request keeps the one that it began with.

`add_adapter`  ->  Adapters  ->  TokenSequence.adapter  ->  SlotCache.adapters  ->  PassLayout  ->  `corrections`
                   by name       for one answer             of its slot              of one pass
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import ConfigError, IncompatibleModels
from ..hf.experts import Experts
from ..hf.peft import MERGE, PeftAdapter, read_adapter
from ..schema import brief, cut
from .corrections import AdaptedLinear, LowRank
from .loaded import LoadedModel

MAX_LORAS = 1024
"""The most adapters at the same time."""
_TAIL = re.compile(r"(?P<above>(?:.*\.)?)(?P<tail>layers\.\d+\..+)")
_OTHER_HALF = re.compile(r"vision|visual|audio|image")
_SAVE = "save the adapter again, or train it for this model"
_TRAIN = "train it for this model, or load the model that it was trained for"


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter for a model.

    fingerprint: of its weights. rank: the largest of a layer. num_bytes: of its factors, and of those that passes read.
    """

    name: str
    folder: Path
    fingerprint: str
    rank: int
    low_rank: LowRank
    num_bytes: int


@final
class Adapters:
    """The adapters that new requests may choose. most: how many there may be."""

    def __init__(self) -> None:
        self.most = 16
        self._by_name = dict[str, Adapter]()
        self._own = WeakSet[Adapter]()  # also those that were removed, while somebody has them

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the order in which they came."""
        return tuple(self._by_name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(adapter.num_bytes for adapter in [*self._by_name.values()])

    def read(self, loaded: LoadedModel, name: str, folder: str | Path) -> Adapter:
        """Read an adapter for a model, so that it can be put here. Raises `ConfigError` if it cannot be used."""
        if not name:
            raise ConfigError("an adapter needs a name", got="an empty text")
        self._check_room(name)
        return read_for(loaded, name, Path(folder))

    def put(self, adapter: Adapter) -> None:
        """Offer an adapter, in the place of one of its name. Raises `ConfigError` for more than there may be."""
        self._check_room(adapter.name)
        self._own.add(adapter)
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Forget an adapter; whoever has it keeps it. Raises `ConfigError` for an unknown name."""
        self.get(name)
        self._by_name.pop(name, None)

    def get(self, name: str | Adapter, folder: str | Path = "") -> Adapter:
        """The adapter of a name, or one that was got before, which may have been removed since.

        Raises `ConfigError` for an unknown name, for one of another model, and where it is from another folder.
        """
        if isinstance(name, Adapter):
            if name in self._own:
                return name
            raise ConfigError("an adapter is of another model", got=brief(name.name), fix="give its name")
        adapter = self._by_name.get(name)
        if adapter is None:
            known, fix = ", ".join(self.names) or "none", "add it: add_adapter(name, folder)"
            raise ConfigError("there is no adapter of this name", got=brief(name), expected=known, fix=fix)
        if folder and Path(folder).resolve() != adapter.folder:
            message, fix = f"the adapter {name!r} is from another folder", "remove it first, or give another name"
            raise ConfigError(message, got=str(folder), expected=str(adapter.folder), fix=fix)
        return adapter

    def _check_room(self, name: str) -> None:
        if name not in self._by_name and len(self._by_name) >= self.most:
            fix = "remove one, or raise max_loras"
            raise ConfigError("there are too many adapters", got=f"{len(self._by_name)}, and {name!r}",
                              expected=f"at most {self.most}", fix=fix)  # fmt: skip


def read_for(loaded: LoadedModel, name: str, folder: Path) -> Adapter:
    """Read an adapter for a model. Raises `ConfigError` for one that cannot be read or does not fit."""
    read = read_adapter(folder)
    try:
        factors = _fitted(loaded, read)
        loaded.check_correcting(factors)
        low_rank = LowRank(factors)
        num_bytes = sum(factor.nbytes for pair in factors.values() for factor in pair)
        num_bytes += loaded.decoder.prepare(low_rank)
    except IncompatibleModels as error:
        message = f"the adapter {name!r} does not fit this model: {error.what}"
        raise ConfigError(message, got=error.got, expected=error.expected, fix=error.fix) from error
    return Adapter(name, folder.resolve(), read.fingerprint, read.rank, low_rank, num_bytes)


def _fitted(loaded: LoadedModel, read: PeftAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors by the paths of the model, in its dtype and on its device."""
    linears, factors = _linears(loaded), dict[str, tuple[Tensor, Tensor]]()
    tails = {match["tail"]: path for path in linears if (match := _TAIL.fullmatch(path))}
    for given, (a, b) in read.pairs.items():
        match = _TAIL.fullmatch(given)
        is_other = match is not None and _OTHER_HALF.search(match["above"])
        path = given if given in linears or match is None or is_other else tails.get(match["tail"], given)
        if path not in linears and given.rpartition(".")[2] == "lm_head":
            raise IncompatibleModels("it changes the output layer", got=given, fix=f"train it without that, or {MERGE}")
        if path not in linears or path in factors:
            trained = f"; it was trained for {cut(read.base)!r}" if read.base else ""
            got, expected = f"{cut(given)}{trained}", f"linear layers such as {next(iter(linears), None)}"
            raise IncompatibleModels("the model has no such layer", got=got, expected=expected, fix=_TRAIN)
        if read.is_for(given) is False:
            raise IncompatibleModels("it holds factors of a layer that its config does not name", got=given, fix=_SAVE)
        shape = linears[path].out_features, linears[path].in_features
        if (len(b), a.shape[1]) != shape:
            message, got = f"its factors for {path} are for another shape", f"{len(b)} outputs of {a.shape[1]} inputs"
            raise IncompatibleModels(message, got=got, expected=f"{shape[0]} of {shape[1]}", fix=_TRAIN)
        factors[path] = _factor(a, path, loaded), _factor(b, path, loaded)
    inside = {path for path, module in loaded.model.named_modules() if isinstance(module, Experts)}
    for path in linears:
        if read.is_for(path) and path not in factors and path.rsplit(".", 2)[0] not in inside:
            raise IncompatibleModels("it lacks factors of a layer that its config names", got=path, fix=_SAVE)
    return factors


def _factor(weight: Tensor, path: str, loaded: LoadedModel) -> Tensor:
    made = weight.to(loaded.device, loaded.dtype).contiguous()
    if not bool(made.isfinite().all()):
        message = f"its factors for {path} are too large for {str(loaded.dtype).removeprefix('torch.')}"
        raise IncompatibleModels(message, fix="load the model with another dtype")
    return made


def _linears(loaded: LoadedModel) -> dict[str, Any]:
    """The linear layers of a model but its output layer, by path."""
    head, inside = loaded.model.get_output_embeddings(), set[torch.nn.Module]()
    linears = dict[str, Any]()
    for path, module in loaded.model.named_modules():
        if isinstance(module, AdaptedLinear):
            inside.add(module.base)
        if hasattr(module, "out_features") and module is not head and module not in inside:
            linears[path] = module
    return linears
