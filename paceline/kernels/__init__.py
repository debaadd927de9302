"""Kernels: in C++ for a CPU, compiled when they are first needed, in Triton for a GPU; without them torch is used."""

from importlib import metadata
from typing import Any

import torch

from .build import Loaded, load

__all__ = ["Loaded", "kernels_for", "load", "name_of"]


def kernels_for(device: torch.device) -> Any:
    """The kernels of a device, `library` or `gpu`, which have the same names; None where there are none."""
    if device.type == "cuda":
        try:
            from . import gpu
        except ImportError:  # no Triton, which comes with torch for CUDA
            return None
        return gpu
    from . import library

    return library if device.type == "cpu" and library.library() is not None else None


def name_of(device: torch.device) -> str:
    """The kernels of a device, or why there are none, as text."""
    if device.type != "cuda":
        return str(load())
    if kernels_for(device) is None:
        return "torch: Triton is not installed (it comes with torch for CUDA)"
    return f"Triton {metadata.version('triton')}"
