"""Runs a transformers model over token trees: cache, attention, numerics. Decides nothing about tokens."""

from .hf_adapter import LoadedModel
from .hf_loading import load_model, wrap_model
from .kv_cache import SlotCache
from .model_runner import ModelRunner
from .weights import with_weights

__all__ = ["LoadedModel", "ModelRunner", "SlotCache", "load_model", "with_weights", "wrap_model"]
