"""The target drafts for itself without some of its attention layers and MLPs (KnapSpec, arXiv 2602.20217).

No second model and no training: weights and KV cache are the target's (Draft & Verify, arXiv 2309.08168; SWIFT,
2410.06916). A skipped attention layer writes no keys; verification writes those of all drafted tokens.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, final

import torch
from pydantic import Field

from ...errors import ConfigError
from ...kernels.build import cache_folder, load
from ...schema import checked, checked_call
from ...system.hardware import cpu_name
from ...target.loaded import LoadedModel
from ..draft_window import WindowSize, suffix_of
from ..self_experts import SelfDraft
from ..spec import DrafterSpec
from .search import chosen, search
from .skips import Layers, Skips, Vocabulary, leave_out, read_skips, write_skips

if TYPE_CHECKING:
    from transformers import PreTrainedModel
Fraction = Annotated[float, Field(gt=0, lt=1)]


@final
class SelfSkip(SelfDraft):
    """Self-draft with skipped sub-layers.

    attention, mlp: the layers without attention, and those without an MLP. Where nothing is given, a set is chosen when
        the drafter is first used with a model on a machine, and kept in the cache.
    vocabulary: the draft knows so many first tokens alone, which tokenizers number by frequency; None: all.
    fraction: how much of a pass the choice is to save; None: what promises the highest speed.
    file: where a choice is: a file that `write_skips` wrote. Raises `IncompatibleModels` for another target.
    context: the length of the texts that it is chosen for; the longer, the dearer is attention.
    window: see `SelfDraft`.

    Raises `ConfigError` for layers that are not one attention and one MLP.
    """

    name: ClassVar[str] = "self-skip"

    @checked_call
    def __init__(
        self,
        attention: Layers | None = None,
        mlp: Layers | None = None,
        vocabulary: Vocabulary | None = None,
        fraction: Fraction | None = None,
        file: str | os.PathLike[str] | None = None,
        context: Annotated[int, Field(ge=1)] = 512,
        window: WindowSize | None = None,
    ):
        named = attention is not None or mlp is not None or vocabulary is not None
        given = Skips(attention or (), mlp or (), vocabulary) if named else None
        if sum(one is not None for one in (given, fraction, file)) > 1:
            raise ConfigError("the skipped layers are given twice", expected="what is skipped, a fraction or a file")
        if given == Skips():
            raise ConfigError("nothing is skipped", fix="name a layer, or leave attention and mlp out")
        self.given, self.fraction, self.file, self.context = given, fraction, file, context
        self.window = window

    def _change(self, model: "PreTrainedModel", target: LoadedModel) -> None:
        self.skips = self.given or self._found(target)
        leave_out(model, self.skips)

    def _found(self, target: LoadedModel) -> Skips:
        """The choice for a target, from its file or the cache, or made now."""
        if self.file is not None:
            return read_skips(self.file, target)
        place = _kept(target, self.fraction, self.context)
        with suppress(OSError, ConfigError):
            return read_skips(place, target)
        found = search(target, self.context)
        choice = chosen(found, self.fraction)
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_skips(place, choice.skips, target, expected=asdict(choice), frontier=[asdict(one) for one in found])
        return choice.skips


def _kept(target: LoadedModel, fraction: float | None, context: int) -> Path:
    """The file of a choice in the cache: of a model, its formats and this machine."""
    formats = sorted({type(module).__name__ + str(getattr(module, "form", "")) for module in target.model.modules()})
    machine = cpu_name(), torch.get_num_threads(), str(load())
    dtypes = str(target.dtype), str(target.kv_dtype)
    facts = repr((target.fingerprint, dtypes, formats, machine, fraction, context))
    return cache_folder("skips") / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"


@checked
class SelfSkipSpec(DrafterSpec):
    """Options of `SelfSkip`. skip: a fraction or a file."""

    skip: Annotated[str, Field(min_length=1)] | Fraction | None = None
    attention: Layers | None = None
    mlp: Layers | None = None
    vocabulary: Vocabulary | None = None
    context: Annotated[int, Field(ge=1)] = 512
    window: WindowSize | None = None
    method = "self_skip"
    drafter = SelfSkip
    tokens = 2

    @property
    def name(self) -> str:
        name = "self-skip" if self.skip is None else f"self-skip:{self.skip}"
        return name + suffix_of(self.window, ":" if self.skip is None else ",")

    def build(self) -> SelfSkip:
        fraction, file = self.skip, None
        if isinstance(fraction, str):
            try:
                fraction = float(fraction)
            except ValueError:
                fraction, file = None, fraction
        return SelfSkip(self.attention, self.mlp, self.vocabulary, fraction, file, self.context, self.window)
