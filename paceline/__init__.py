"""Exact speculative decoding for Hugging Face language and vision-language models: faster answers, the same answers."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Loaded on first use, so that `paceline --help` does not wait for torch.
_MODULES = {
    "llm": "LLM",
    "async_llm": "AsyncLLM",
    "integrations.custom_generate": "hf_model",
    "core.request": "RequestOutputKind SamplingParams",
    "core.structured": "StructuredOutputsParams",
    "core.round": "Origin Round",
    "engine.embeddings": "EmbeddingOutput PoolingParams",
    "engine.output": "Completion RequestOutput StreamChunk",
    "engine.scores": "ScoringOutput",
    "methods": "Blockwise Choose DFlash DSpark DraftModel Eagle JetSpec JumpForward Lookahead Medusa Ouroboros Plain "
    "PredictedOutput PromptLookup SelfExperts SelfQuantized SelfSkip Space Suffix TokenRecycling",
    "policy": "CostModel Dynamic Fixed",
    "verify": "Coupled Ratio Typical",
    "cascade": "Cascade",
    "errors": "PacelineError",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOME:
        from .system.hardware import set_waiting, uncollected

        if "torch" not in sys.modules:  # which reads once how its threads wait
            set_waiting()
        with uncollected():
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:  # the same names for type checkers, which take "as" for public
    from .async_llm import AsyncLLM as AsyncLLM
    from .cascade import Cascade as Cascade
    from .core.request import RequestOutputKind as RequestOutputKind
    from .core.request import SamplingParams as SamplingParams
    from .core.round import Origin as Origin
    from .core.round import Round as Round
    from .core.structured import StructuredOutputsParams as StructuredOutputsParams
    from .engine.embeddings import EmbeddingOutput as EmbeddingOutput
    from .engine.embeddings import PoolingParams as PoolingParams
    from .engine.output import Completion as Completion
    from .engine.output import RequestOutput as RequestOutput
    from .engine.output import StreamChunk as StreamChunk
    from .engine.scores import ScoringOutput as ScoringOutput
    from .errors import PacelineError as PacelineError
    from .integrations.custom_generate import hf_model as hf_model
    from .llm import LLM as LLM
    from .methods.choose import Choose as Choose
    from .methods.dflash.drafter import DFlash as DFlash
    from .methods.dflash.jetspec import JetSpec as JetSpec
    from .methods.draft_model.drafter import DraftModel as DraftModel
    from .methods.dspark.drafter import DSpark as DSpark
    from .methods.eagle.drafter import Eagle as Eagle
    from .methods.jump_forward import JumpForward as JumpForward
    from .methods.lookahead import Lookahead as Lookahead
    from .methods.lookup import PromptLookup as PromptLookup
    from .methods.ouroboros import Ouroboros as Ouroboros
    from .methods.parallel.drafter import Blockwise as Blockwise
    from .methods.parallel.drafter import Medusa as Medusa
    from .methods.plain import Plain as Plain
    from .methods.prediction import PredictedOutput as PredictedOutput
    from .methods.recycling import TokenRecycling as TokenRecycling
    from .methods.self_experts import SelfExperts as SelfExperts
    from .methods.self_int4.drafter import SelfQuantized as SelfQuantized
    from .methods.self_skip.drafter import SelfSkip as SelfSkip
    from .methods.space.drafter import Space as Space
    from .methods.suffix.drafter import Suffix as Suffix
    from .policy import CostModel as CostModel
    from .policy import Dynamic as Dynamic
    from .policy import Fixed as Fixed
    from .verify import Coupled as Coupled
    from .verify import Ratio as Ratio
    from .verify import Typical as Typical
