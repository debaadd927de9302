"""Native kernels in C++, compiled when they are first needed; without them torch is used."""

from .build import Loaded, load

__all__ = ["Loaded", "load"]
