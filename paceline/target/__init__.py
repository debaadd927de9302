"""Runs a transformers model over token trees: layers, adapters, numerics. It never chooses tokens."""

from ..attention.kv_cache import SlotCache
from .load import load_model, rounded, with_activations, with_weights, wrap_model
from .loaded import LoadedModel
from .numerics import make_runner
from .runner import ModelRunner

__all__ = [
    "LoadedModel", "ModelRunner", "SlotCache", "load_model", "make_runner", "rounded", "with_activations",
    "with_weights", "wrap_model",
]  # fmt: skip
