"""Kernels in C++, compiled when they are first needed; without them torch does the work."""

from .build import Loaded, load

__all__ = ["Loaded", "load"]
