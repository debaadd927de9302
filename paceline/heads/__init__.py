"""Trained heads as folders: config.json, model.safetensors, README.md (model card), training.json (how it was made).

folder   write and read one
kinds    which method has which module, and its configuration as JSON
card     the model card, from the record of the training
"""

from .card import model_card
from .folder import HeadInfo, head_info, load_head, read_record, save_head, trained_info
from .kinds import METHODS, Head, method_of

__all__ = [
    "METHODS",
    "Head",
    "HeadInfo",
    "head_info",
    "load_head",
    "method_of",
    "model_card",
    "read_record",
    "save_head",
    "trained_info",
]
