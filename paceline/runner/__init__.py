"""Runs a transformers model over token trees: cache, attention, numerics. Decides nothing about tokens."""

from ..attention.kv_cache import SlotCache
from .load import load_model, with_weights, wrap_model
from .loaded import LoadedModel
from .model_runner import ModelRunner

__all__ = ["LoadedModel", "ModelRunner", "SlotCache", "load_model", "with_weights", "wrap_model"]
