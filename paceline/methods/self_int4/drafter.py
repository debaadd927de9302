"""The target drafts for itself with its own linear layers in INT4 (QSpec, arXiv 2410.11305).

No second model: embeddings, norms and the KV cache are the target's. Its weights are the target's rounded to the
nearest, or trained ones (`paceline train qat`).
"""

import os
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

from ...errors import ConfigError
from ...quant.linears import LmHead, QuantReport, quantize_head, quantize_linears
from ...schema import checked, checked_call
from ...target.adapters import put_int4
from ...target.loaded import LoadedModel
from ...zoo.packaged import head_folder
from ..draft_model.drafter import llama_cpp_draft
from ..draft_window import WindowSize, suffix_of
from ..heads.folder import load_head
from ..self_experts import NumExperts, SelfDraft, choose_fewer
from ..spec import DrafterSpec
from .head import Int4Draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@final
class SelfQuantized(SelfDraft):
    """INT4 self-draft.

    group_size: how many weights share a scale (32, 64, 128 or 256); smaller groups draft better and need a little more
        memory.
    lm_head: `"int4"`, or `"shared"` for the target's own.
    bits: 3 and 2 round further, and take less memory and time with native kernels; few such drafts are accepted.
    weights: a folder of trained weights, or an `Int4Draft`, which have their own bits and group size. Raises
        `IncompatibleModels` for a folder that was trained for another target.
    experts: how many of them a token takes in each layer of a mixture, fewer than in the target; None: as many.
    window: how many of the last tokens of a long text it reads, see `SelfDraft`.
    """

    name: ClassVar[str] = "self-int4"

    @checked_call
    def __init__(
        self,
        group_size: int = 32,
        lm_head: LmHead = "int4",
        bits: int = 4,
        weights: str | os.PathLike[str] | Int4Draft | None = None,
        experts: NumExperts | None = None,
        window: WindowSize | None = None,
    ):
        self.group_size, self.bits, self.weights = group_size, bits, weights
        self.experts, self.window = experts, window
        self.lm_head: LmHead = lm_head
        self.report: QuantReport | None = None

    def _change(self, model: "PreTrainedModel", target: LoadedModel) -> None:
        """The output head is never trained; beside trained weights it is rounded to 4 bits if `lm_head` allows."""
        weights = self.weights
        if self.experts is not None:
            choose_fewer(model, self.experts)
        if weights is None:
            self.report = quantize_linears(model, self.group_size, self.lm_head, self.bits)
            return
        draft = weights if isinstance(weights, Int4Draft) else load_head(weights, target)
        if not isinstance(draft, Int4Draft):
            raise ConfigError(
                f"{str(weights)!r} has no weights of a self-draft", got=type(draft).__name__,
                expected="a folder that `paceline train qat` wrote",
            )  # fmt: skip
        layers = put_int4(model, draft)
        self.report = QuantReport(len(layers), 0, sum(layer.num_bytes for layer in layers))
        if self.lm_head != "shared":
            self.report = quantize_head(model, draft.config.group_size, self.report)


@checked
class SelfInt4Spec(DrafterSpec):
    """Options of `SelfQuantized`.

    model: a folder of trained weights, which have their own bits and group size.
    """

    model: Annotated[str, Field(min_length=1)] | None = None
    group_size: Literal[32, 64, 128, 256] | None = None
    lm_head: LmHead = "int4"
    bits: Literal[4, 3, 2] | None = None
    experts: NumExperts | None = None
    window: WindowSize | None = None
    method = "self_int4"
    label = "self-int4"
    tokens = 4

    def __post_init__(self) -> None:
        sizes = [key for key in ("group_size", "bits") if getattr(self, key) is not None]
        if self.model is None:
            object.__setattr__(self, "group_size", self.group_size or 32)
            object.__setattr__(self, "bits", self.bits or 4)
        elif sizes:
            raise ConfigError(f"trained weights have their own {' and '.join(sizes)}", fix="leave it out, or the model")

    @property
    def name(self) -> str:
        fewer = "" if self.experts is None else f"-top{self.experts}"
        name = f"self-int{self.bits}{fewer}" if self.model is None else f"self-int4{fewer}:{self.model}"
        return name + suffix_of(self.window, ":" if self.model is None else ",")

    def as_dict(self) -> dict[str, object]:
        options = super().as_dict()
        return (
            options if self.model is None else {key: options[key] for key in ("model", "lm_head", "experts", "window")}
        )

    def build(self) -> SelfQuantized:
        folder = None if self.model is None else str(head_folder(self.model))
        return SelfQuantized(self.group_size or 32, self.lm_head, self.bits or 4, folder, self.experts, self.window)

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """A second copy in llama.cpp."""
        none = f"no INT{self.bits or 4} self-draft"
        copy = f"{none}: this loads a second copy with a cache of its own"
        return {
            "vLLM": ("", f"{none}; an INT4 checkpoint as its draft is a second copy"),
            "SGLang": ("", none),
            "llama.cpp": llama_cpp_draft("model-Q4_0.gguf", tokens, copy),
        }
