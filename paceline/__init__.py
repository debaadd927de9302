"""Exact speculative decoding for Hugging Face language and vision-language models: faster answers, the same answers."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Loaded on first use, so that `paceline --help` does not wait for torch.
_MODULES = {
    "llm": "LLM",
    "async_llm": "AsyncLLM",
    "core.request": "RequestOutputKind SamplingParams",
    "core.structured": "StructuredOutputsParams",
    "core.outputs": "Origin Round",
    "outputs": "Completion RequestOutput StreamChunk",
    "drafters": "Blockwise Choose DraftModel Eagle JumpForward Lookahead Medusa Mtp Ouroboros Plain PromptLookup "
    "SelfQuantized Space Suffix TokenRecycling",
    "policy": "CostModel Dynamic Fixed",
    "verify": "Coupled Ratio Typical",
    "cascade": "Cascade",
    "errors": "PacelineError",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [
    "LLM",
    "AsyncLLM",
    "Blockwise",
    "Cascade",
    "Choose",
    "Completion",
    "CostModel",
    "Coupled",
    "DraftModel",
    "Dynamic",
    "Eagle",
    "Fixed",
    "JumpForward",
    "Lookahead",
    "Medusa",
    "Mtp",
    "Origin",
    "Ouroboros",
    "PacelineError",
    "Plain",
    "PromptLookup",
    "Ratio",
    "RequestOutput",
    "RequestOutputKind",
    "Round",
    "SamplingParams",
    "SelfQuantized",
    "Space",
    "StreamChunk",
    "StructuredOutputsParams",
    "Suffix",
    "TokenRecycling",
    "Typical",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        if "torch" not in sys.modules:  # which reads once how its threads wait
            from .system.hardware import set_waiting

            set_waiting()
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .cascade import Cascade
    from .core.outputs import Origin, Round
    from .core.request import RequestOutputKind, SamplingParams
    from .core.structured import StructuredOutputsParams
    from .drafters import (
        Blockwise,
        Choose,
        DraftModel,
        Eagle,
        JumpForward,
        Lookahead,
        Medusa,
        Mtp,
        Ouroboros,
        Plain,
        PromptLookup,
        SelfQuantized,
        Space,
        Suffix,
        TokenRecycling,
    )
    from .errors import PacelineError
    from .llm import LLM
    from .outputs import Completion, RequestOutput, StreamChunk
    from .policy import CostModel, Dynamic, Fixed
    from .verify import Coupled, Ratio, Typical
